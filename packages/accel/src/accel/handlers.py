"""Sorting `kwargs_handlers` by what they configure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accel_parallel import DistributedDataParallelKwargs
from accel_precision import AutocastKwargs, GradScalerKwargs
from accel_state import InitProcessGroupKwargs, KwargsHandler
from accel_state.errors import SettingError

HANDLED: tuple[type[KwargsHandler], ...] = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
"""The handlers that something here reads; at most one of each."""


def sort_handlers(handlers: Iterable[Any] | None) -> dict[type[KwargsHandler], Any]:
    """Class to handler.

    Raises:
        SettingError: two of one class, or an object that nothing here would read.
    """
    by_class: dict[type[KwargsHandler], Any] = {}
    for handler in handlers or ():
        kind = next((kind for kind in HANDLED if isinstance(handler, kind)), None)
        if kind is None:
            allowed = ", ".join(kind.__name__ for kind in HANDLED)
            raise SettingError(
                f"kwargs_handlers holds {handler!r} of type {type(handler).__name__}, which nothing here reads: "
                f"allowed are {allowed}"
            )
        if kind in by_class:
            raise SettingError(f"kwargs_handlers holds two {kind.__name__}: give one with all its fields")
        by_class[kind] = handler
    return by_class
