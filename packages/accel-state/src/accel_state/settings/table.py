"""The rows of all concerns together."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from accel_state.errors import SettingError
from accel_state.settings import (
    compiling,
    deepspeed,
    device,
    engines,
    fp8,
    fsdp,
    launching,
    megatron,
    parallelism,
    reporting,
    training,
)
from accel_state.settings.model import Setting

SECTIONS: tuple[tuple[str, tuple[Setting, ...]], ...] = (
    ("device", device.SETTINGS),
    ("training", training.SETTINGS),
    ("engines", engines.SETTINGS),
    ("compiling", compiling.SETTINGS),
    ("fsdp", fsdp.SETTINGS),
    ("parallelism", parallelism.SETTINGS),
    ("deepspeed", deepspeed.SETTINGS),
    ("megatron", megatron.SETTINGS),
    ("fp8", fp8.SETTINGS),
    ("launching", launching.SETTINGS),
    ("machines", launching.MACHINES),
    ("tpu", launching.TPU),
    ("reporting", reporting.SETTINGS),
)


@cache
def all_settings() -> tuple[Setting, ...]:
    """Every setting, in the order in which it is shown."""
    return tuple(row for _, rows in SECTIONS for row in rows)


@cache
def _by_key() -> dict[str, Setting]:
    return {row.key: row for row in all_settings()}


def find_setting(key: str) -> Setting:
    """The row of a key.

    Raises:
        SettingError: there is none; names the nearest.
    """
    row = _by_key().get(key)
    if row is None:
        raise SettingError(f"there is no setting {key!r}{nearest(key, _by_key())}")
    return row


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known name that looks most like `name`, or nothing."""
    import difflib  # only on the way to a message

    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
