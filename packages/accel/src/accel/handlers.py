"""Sorting `kwargs_handlers` by what they configure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import accel_parallel
import accel_precision
import accel_state
from accel_state.errors import SettingError

OWNERS = {
    "AutocastKwargs": accel_precision,
    "DistributedDataParallelKwargs": accel_parallel,
    "GradScalerKwargs": accel_precision,
    "InitProcessGroupKwargs": accel_state,
}
"""The handlers that something here reads; at most one of each."""


def sort_handlers(handlers: Iterable[Any] | None) -> dict[str, Any]:
    """Name of the handler's class, as in `OWNERS`, to handler.

    Raises:
        SettingError: two of one class, or an object that nothing here would read.
    """
    by_name: dict[str, Any] = {}
    if handlers is not None and not isinstance(handlers, list | tuple):
        raise SettingError(f"kwargs_handlers={handlers!r} is a {type(handlers).__name__}: give a list of handlers")
    for handler in handlers or ():
        name = next((name for name, owner in OWNERS.items() if isinstance(handler, getattr(owner, name))), None)
        if name is None:
            raise SettingError(
                f"kwargs_handlers holds {handler!r} of type {type(handler).__name__}, which nothing here reads: "
                f"allowed are {', '.join(OWNERS)}"
            )
        if name in by_name:
            raise SettingError(f"kwargs_handlers holds two {name}: give one with all its fields")
        by_name[name] = handler
    return by_name
