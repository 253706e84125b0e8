"""Configuration files: ours and every version of the peer's that it still reads, as settings by key.

A file is a mapping of settings, some in sections (`fsdp_config`). Its places follow from the settings table; what older
versions called otherwise stands in `RENAMED`, and what only other commands read in `OTHER_KEYS`. A key that nobody
knows is refused, at any depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from accel_state.errors import LaunchError, SettingError
from accel_state.settings import Setting, all_settings
from accel_state.settings.table import nearest

_PREFIXES: Final = {
    "dynamo_config": "dynamo_",
    "fsdp_config": "fsdp_",
    "fp8_config": "fp8_",
    "megatron_lm_config": "megatron_lm_",
    "parallelism_config": "parallelism_config_",
    "deepspeed_config": "deepspeed_",
    "mpirun_config": "mpirun_",
}
"""Section to what its keys may leave out at their front."""

RENAMED: Final = {
    "dynamo_backend": "dynamo_config.dynamo_backend",
    "deepspeed_config.gradient_accumulation_steps": "gradient_accumulation_steps",
    "fp8_config.fp8_amax_history_length": "fp8_config.fp8_amax_history_len",
    "fp8_config.amax_history_length": "fp8_config.fp8_amax_history_len",
    "fp8_config.optimization_level": "fp8_config.fp8_opt_level",
    "fsdp_config.fsdp_backward_prefetch_policy": "fsdp_config.fsdp_backward_prefetch",
    "cpu": "use_cpu",
    "cpu_affinity": "enable_cpu_affinity",
    "mpirun_hostfile": "mpirun_config.mpirun_hostfile",
}
"""Where older files have a setting, to where its row has it."""

_DISTRIBUTED_TYPES: Final[Mapping[str, str | None]] = {
    **dict.fromkeys(("NO", "TP", "MULTI_CPU"), None),
    **{f"MULTI_{kind}": None for kind in ("NPU", "XPU", "MLU", "MUSA", "SDAA", "HPU", "NEURON")},
    "MULTI_GPU": "multi_gpu",
    "FSDP": "use_fsdp",
    "DEEPSPEED": "use_deepspeed",
    "MEGATRON_LM": "use_megatron_lm",
    "XLA": "tpu",
    "TPU": "tpu",
}
"""What a file calls the kind of a run, to the setting that asks for it."""

OTHER_KEYS: Final = (
    *("tpu_name", "tpu_zone", "tpu_vm", "tpu_env", "commands", "command_file"),
    *("ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name", "pytorch_version"),
    *("transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args"),
)
"""Keys that no setting has: the first row is for `accel tpu-config`, the rest are of jobs on SageMaker."""

_SECTION_ASKS_FOR: Final = {"parallelism_config": "use_parallelism_config"}


class ConfigFile(NamedTuple):
    """What a file says.

    Attributes:
        path: of the file; empty for none.
        values: setting's key to value, as read, for settings that it gives.
        places: setting's key to its place in the file, for messages.
        others: the keys of `OTHER_KEYS` that it gives.
        sagemaker: whether it describes a job on Amazon SageMaker.
    """

    path: str
    values: Mapping[str, Any]
    places: Mapping[str, str]
    others: Mapping[str, Any]
    sagemaker: bool = False


NO_FILE: Final = ConfigFile("", {}, {}, {})


def default_config_path(environ: Mapping[str, str]) -> Path:
    """Where `accel config` writes: `accel/config.yaml` in the user's folder for configuration."""
    folder = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".config")
    return Path(folder) / "accel" / "config.yaml"


def peer_config_path(environ: Mapping[str, str]) -> Path:
    """Where the peer's `config` command writes; read where ours is absent."""
    cache = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".cache")
    home = environ.get("HF_HOME") or str(Path(cache) / "huggingface")
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"


def find_config(path: str | None, environ: Mapping[str, str]) -> ConfigFile:
    """Read the file that is asked for, else the one at a default location, else nothing.

    Raises:
        LaunchError: the file that is asked for is absent, or what is found cannot be read.
    """
    if path is not None:
        return read_config(Path(path))
    peer = peer_config_path(environ)
    for candidate in (default_config_path(environ), peer, peer.with_suffix(".yml"), peer.with_suffix(".json")):
        if candidate.is_file():
            return read_config(candidate)
    return NO_FILE


def read_config(path: Path) -> ConfigFile:
    """Read a YAML or JSON file.

    Raises:
        LaunchError: it cannot be read; with line and column where it is not YAML, and with the nearest known key
            where one is unknown.
    """
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    others: dict[str, Any] = {}
    rows = {
        row.yaml: row
        for row in all_settings()
        if row.yaml != "deepspeed_config.deepspeed_fields_from_accelerate_config"
    }
    kind, environment = "NO", "LOCAL_MACHINE"
    for place, value in _leaves(load_mapping(path), path):
        if value is None or value == "" or (place == "num_processes" and value == -1):
            continue
        if place == "distributed_type":
            kind = "NO" if value is False else str(value).upper()
        elif place == "compute_environment":
            environment = str(value)
        elif place in OTHER_KEYS:
            others[place] = value
        elif place == "fp16":
            values["mixed_precision"], places["mixed_precision"] = "fp16" if value else "no", place
        elif place.removeprefix("fp8_config.").removeprefix("fp8_") == "override_linear_precision":
            values |= _linear_precisions(value, path)
        else:
            row = _find(rows, place, path)
            values[row.key], places[row.key] = _plain(row, value), place
    _ask_for_kind(kind, values, places, path)
    if environment not in ("LOCAL_MACHINE", "AMAZON_SAGEMAKER"):
        raise LaunchError(
            f"{path}: compute_environment: {environment!r} is not allowed; give LOCAL_MACHINE or AMAZON_SAGEMAKER"
        )
    return ConfigFile(str(path), values, places, others, environment == "AMAZON_SAGEMAKER")


def load_mapping(path: Path) -> dict[str, Any]:
    """The mapping that a YAML or JSON file holds; an empty file is an empty one.

    Raises:
        LaunchError: there is no such file, it is not YAML (with line and column), or not a mapping.
    """
    import yaml

    from accel_launch.yaml_loading import Loader

    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader)  # noqa: S506  a SafeLoader, which refuses doubled keys
    except OSError as error:
        raise LaunchError(f"the configuration file {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise LaunchError(f"{path} is not a text in UTF-8: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise LaunchError(f"{path}{where}: {error.problem or 'this is not YAML'}") from None
    except yaml.YAMLError as error:
        raise LaunchError(f"{path} is not YAML: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise LaunchError(f"{path} holds a {type(found).__name__}: a configuration is a mapping, `key: value` lines")
    return found


def _leaves(mapping: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    """Each value and its place, with a dot after a section. A section that is there asks for what it configures."""
    sections = {row.yaml.partition(".")[0] for row in all_settings() if "." in row.yaml}
    for key, value in mapping.items():
        if key not in sections:
            yield str(key), value
        elif isinstance(value, dict):
            if value and key in _SECTION_ASKS_FOR:
                yield _SECTION_ASKS_FOR[key], True
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        elif value is not None:
            raise LaunchError(f"{path}: {key}: {value!r} is not allowed; give `key: value` lines, indented")


def _find(rows: Mapping[str, Setting], place: str, path: Path) -> Setting:
    section, _, key = place.rpartition(".")
    full = f"{section}.{_PREFIXES.get(section, '')}{key}"
    for candidate in (place, RENAMED.get(place, ""), full, RENAMED.get(full, "")):
        if candidate in rows:
            return rows[candidate]
    known = [row.rpartition(".")[2] for row in rows if row.rpartition(".")[0] == section]
    known += [name.removeprefix(_PREFIXES.get(section, "")) for name in known if section]
    if not section:
        known += ["distributed_type", "compute_environment", *OTHER_KEYS, *_PREFIXES]
    raise LaunchError(
        f"{path}: unknown key {place!r}{nearest(key, known)}. Correct or remove it; a file that a newer version wrote "
        "needs that version"
    )


def _plain(row: Setting, value: Any) -> Any:
    """What YAML makes of unquoted words, back as the setting has it: `no` is False there, and 2 not a text."""
    if isinstance(value, (list, tuple)) and row.type is str:
        return ",".join(map(str, value))
    if row.type is not str or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "no" if not value and row.key in ("mixed_precision", "dynamo_backend") else str(value).lower()
    return str(value)


def _linear_precisions(value: Any, path: Path) -> dict[str, bool]:
    from accel_launch.flags import read_linear_precisions

    try:
        return read_linear_precisions(value)
    except SettingError as error:
        raise LaunchError(f"{path}: {error}") from None


def _ask_for_kind(kind: str, values: dict[str, Any], places: dict[str, str], path: Path) -> None:
    if kind not in _DISTRIBUTED_TYPES:
        raise LaunchError(
            f"{path}: distributed_type: {kind!r} is not allowed{nearest(kind, _DISTRIBUTED_TYPES)}; give one of "
            + ", ".join(_DISTRIBUTED_TYPES)
        )
    key = _DISTRIBUTED_TYPES[kind]
    if key is not None:
        values.setdefault(key, True)
        places.setdefault(key, f"distributed_type: {kind}")
