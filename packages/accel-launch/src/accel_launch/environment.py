"""The variables that processes get beside their rank: settings under our names and the peer's, threads, devices.

Of what nobody set, the peer's launcher exports its defaults too, and code reads them: those go out under the peer's
names alone, so that `accel env` still tells them from what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from accel_launch import flags
from accel_launch.checks import chosen_gpus
from accel_launch.config import LaunchConfig
from accel_state.errors import LaunchError
from accel_state.settings import find_setting, worker_environment
from accel_state.settings.table import SECTIONS

_ALWAYS: Final[Mapping[str, Any]] = {
    "mixed_precision": "no",
    "cpu": False,
    "dynamo_backend": "no",
    "dynamo_mode": "default",
    "dynamo_use_fullgraph": False,
    "dynamo_use_dynamic": False,
    "dynamo_use_regional_compilation": False,
}
"""What the peer exports whatever was asked for."""

_WITH: Final = {
    "use_fsdp": "fsdp",
    "use_megatron_lm": "megatron",
    "use_parallelism_config": "parallelism",
}
"""Setting to the section whose defaults the peer exports with it."""

_NOT_EXPORTED: Final = (
    "parallelism_config_cp_comm_strategy",
    "parallelism_config_sp_seq_length_is_variable",
    "parallelism_config_sp_attn_implementation",
)
"""Defaults of those sections that the peer keeps to itself unless their axis is used."""


def shared_environment(config: LaunchConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """What all processes of a launch get.

    Args:
        config: the launch.
        environ: what the launcher itself has.
    """
    told = {key: found.value for key, found in config.settings.items() if not found.origin.startswith("default")}
    if config.value("use_deepspeed"):
        told["deepspeed_fields_from_accelerate_config"] = ",".join(_given_by_file(config, "deepspeed_config")) or None
    variables = _peer_defaults(config) | worker_environment(told)
    variables |= _threads(config, environ)
    gpus = chosen_gpus(config.value("gpu_ids"))
    if gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = gpus
    if config.value("num_processes") > 1:
        variables |= {"ROLE_NAME": config.value("role"), "ROLE_WORLD_SIZE": str(config.value("num_processes"))}
        variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if config.value("mpirun_ccl") is not None:
        variables["CCL_WORKER_COUNT"] = str(config.value("mpirun_ccl"))
    if config.value("as_accelerate"):
        variables["PYTHONPATH"] = _alias_path(environ)
    return variables


def _peer_defaults(config: LaunchConfig) -> dict[str, str]:
    defaults = dict(_ALWAYS)
    for key, title in _WITH.items():
        if config.value(key):
            rows = next(rows for name, rows in SECTIONS if name == title)
            known = {row.key: flags.default(row) for row in rows if row.key not in _NOT_EXPORTED}
            defaults |= {key: value for key, value in known.items() if value is not None}
    if config.value("mixed_precision") == "fp8":
        rows = next(rows for name, rows in SECTIONS if name == "fp8")
        defaults |= {row.key: flags.default(row) for row in rows if flags.default(row) is not None}
    variables = {}
    for key, value in defaults.items():
        row = find_setting(key)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        variables.update(dict.fromkeys(row.fallback_env, text))
    return variables


def _given_by_file(config: LaunchConfig, section: str) -> list[str]:
    """What a section of the configuration file gives: a DeepSpeed configuration of its own must not contradict it."""
    places = [found.origin.partition(": ")[2] for found in config.settings.values() if found.origin.startswith("file ")]
    return [place.partition(".")[2] for place in places if place.startswith(f"{section}.")]


def _threads(config: LaunchConfig, environ: Mapping[str, str]) -> dict[str, str]:
    threads = config.value("num_cpu_threads_per_process")
    if threads is None and config.value("num_processes") > 1 and "OMP_NUM_THREADS" not in environ:
        threads = 1  # as torchrun: all cores for each process would slow every one of them down
    return {} if threads is None else {"OMP_NUM_THREADS": str(threads)}


def _alias_path(environ: Mapping[str, str]) -> str:
    """PYTHONPATH with the folder that answers `import accelerate` in front; the umbrella package brings it."""
    import importlib

    try:
        compat = importlib.import_module("accel.compat")
    except ModuleNotFoundError as error:
        raise LaunchError(
            "--as-accelerate needs the package accel, which is not installed: pip install accel"
        ) from error
    path: str = compat.child_environment(environ)["PYTHONPATH"]
    return path
