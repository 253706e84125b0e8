"""Configuration files written: as `files.py` reads them, and the peer too where it knows the keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from accel_launch.files import ConfigFile
from accel_state.errors import LaunchError
from accel_state.settings import find_setting

_KINDS: Final = {
    "use_fsdp": "FSDP",
    "use_deepspeed": "DEEPSPEED",
    "use_megatron_lm": "MEGATRON_LM",
    "tpu": "XLA",
    "multi_gpu": "MULTI_GPU",
}
"""Setting to what a file calls the kind of a run; the first that holds names it."""

_FOLLOWS: Final = (*_KINDS, "use_parallelism_config")
"""What a reader works out from the kind and from the sections that are there."""


def config_text(values: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> str:
    """Settings by key as YAML, in sections.

    Args:
        values: what to write; None is left out.
        others: keys that are no settings, as `ConfigFile.others` has them.
    """
    import yaml

    kind = next((word for key, word in _KINDS.items() if values.get(key)), "NO")
    tree: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind, **(others or {})}
    for key, value in values.items():
        if value is None or key in _FOLLOWS:
            continue
        section, _, name = find_setting(key).yaml.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return yaml.safe_dump(tree, sort_keys=True, default_flow_style=False)


def updated_text(file: ConfigFile) -> str:
    """The text of a file with every key where this version has it; what it says stays.

    Raises:
        SettingError: a value that is not allowed.
    """
    values = {key: find_setting(key).parse(value, file.places.get(key, key)) for key, value in file.values.items()}
    return config_text(values, file.others)


def write_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Put a text where a file is, or will be, at one instant.

    Args:
        path: where.
        text: the whole of it.
        mode: who may read and write it, of which the system takes off what the user's mask says.

    Raises:
        LaunchError: the folder cannot be made or written to.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise LaunchError(f"{str(path)!r} cannot be written: {error.strerror}") from None
