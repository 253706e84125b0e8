"""Sorting `kwargs_handlers` by what they configure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import accel_parallel
import accel_precision
import accel_state
import accel_tracking
from accel_state.errors import SettingError

OWNERS = {
    "AORecipeKwargs": accel_precision,
    "AutocastKwargs": accel_precision,
    "DistributedDataParallelKwargs": accel_parallel,
    "FP8RecipeKwargs": accel_precision,
    "GradScalerKwargs": accel_precision,
    "InitProcessGroupKwargs": accel_state,
    "MSAMPRecipeKwargs": accel_precision,
    "ProfileKwargs": accel_tracking,
    "TERecipeKwargs": accel_precision,
}
"""The handlers that something here reads; at most one of each."""

RECIPES = ("AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs", "FP8RecipeKwargs")
"""The handlers of 8-bit floats: at most one of all."""


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
    recipes = [name for name in RECIPES if name in by_name]
    if len(recipes) > 1:
        raise SettingError(
            f"kwargs_handlers holds {' and '.join(recipes)}: one library computes in fp8, give its recipe"
        )
    return by_name


def recipe_of(handlers: Mapping[str, Any], mixed_precision: str) -> Any:
    """The recipe of 8-bit floats among the handlers, or None.

    Raises:
        SettingError: there is one, and this run does not compute in fp8.
    """
    name = next((name for name in RECIPES if name in handlers), None)
    if name is not None and mixed_precision != "fp8":
        raise SettingError(
            f"kwargs_handlers holds {name}, which has no effect with mixed_precision={mixed_precision!r}: use "
            "mixed_precision='fp8', or leave it out"
        )
    return None if name is None else handlers[name]
