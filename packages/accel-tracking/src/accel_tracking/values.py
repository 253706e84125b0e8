"""What users log, made plain: scalars out of tensors, JSON without NaN, configurations without credentials."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from accel_state.errors import TrackerError

MASK = "***"

# whole words of a key, after `apiKey`, `API_KEY` and `api-key` were brought to the form `api_key`
_CREDENTIAL_KEY = re.compile(
    r"(^|_)(pass(words?|wd|phrase)|pwd|secrets?|credentials?|api_?keys?|(access|private|secret|ssh|encryption)_?keys?"
    r"|authorization|bearer)(_|$)"
)
_TOKEN_KEY = re.compile(r"(^|_)token$")
_TOKEN_VALUE = re.compile(r"[A-Za-z0-9_\-.+/=:]{8,}")  # no credential of any service has `<` or `[`; special tokens do
_WORD_BREAK = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")


def _is_credential(key: str, value: Any) -> bool:
    words = _WORD_BREAK.sub("_", key).lower()
    if _TOKEN_KEY.search(words):
        return isinstance(value, str) and _TOKEN_VALUE.fullmatch(value) is not None
    return _CREDENTIAL_KEY.search(words) is not None and not isinstance(value, bool | None | Mapping)


def mask_secrets(config: Any) -> Any:
    """A copy of a configuration in which values whose keys look like credentials are replaced by `***`.

    Passwords, secrets, API and access keys and authorization headers are recognised by words of the key, in any
    spelling (`WANDB_API_KEY`, `apiKey`); keys that end in `token` only where the value looks like a credential, so
    that `pad_token="<pad>"` and `max_tokens=512` stay readable. Nested mappings, lists and tuples are searched too.
    """
    if isinstance(config, Mapping):
        return {
            key: MASK if isinstance(key, str) and _is_credential(key, value) else mask_secrets(value)
            for key, value in config.items()
        }
    if isinstance(config, list | tuple):
        return [mask_secrets(item) for item in config]
    return config


def scalar(value: Any) -> Any:
    """The Python number behind a tensor, array or numpy scalar of one element; anything else unchanged.

    Reading a tensor that lies on an accelerator waits for it.
    """
    if isinstance(value, bool | int | float | str) or not hasattr(value, "item"):
        return value
    count = value.numel() if hasattr(value, "numel") else getattr(value, "size", 1)
    return value.item() if count == 1 else value


def plain(value: Any) -> Any:
    """The value in JSON's types.

    Tensors and arrays become numbers or nested lists; data classes, mappings, sequences and sets are taken apart;
    enums give their value and paths their text. NaN and the infinities, which JSON does not have, become the strings
    `"NaN"`, `"Infinity"` and `"-Infinity"`: `float()` reads each back. Any other object becomes its `repr`.
    """
    value = scalar(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _name_of(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | Set):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return repr(value)


def _name_of(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def rows_of(
    table_name: str, columns: Sequence[str] | None, data: Sequence[Sequence[Any]] | None, dataframe: Any = None
) -> tuple[list[str] | None, list[list[Any]]]:
    """A table's columns and rows, from rows or from a pandas data frame.

    Raises:
        TrackerError: there are neither, or both.
    """
    if (data is None) == (dataframe is None):
        raise TrackerError(
            f"log_table({table_name!r}) takes either rows, `data=` with `columns=`, or a data frame, `dataframe=`"
        )
    if dataframe is not None:
        return [str(name) for name in dataframe.columns], dataframe.to_numpy().tolist()
    assert data is not None
    return None if columns is None else [str(name) for name in columns], [list(row) for row in data]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level: `{"optimizer": {"lr": 1}}` becomes `{"optimizer.lr": 1}`."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result
