"""Functions of the user's that run before a checkpoint is written or loaded: the peer's pre-hooks."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accel_parallel
from accel_state.errors import CheckpointError, SettingError

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle


class StateHooks:
    """The hooks of one Accelerator, called in the order in which they were registered.

    Args:
        models: the Accelerator's list of prepared models, which hooks get. What they pop from it is back afterwards.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self._models = models
        self._save: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._load: OrderedDict[int, Callable[..., None]] = OrderedDict()

    def on_save(self, hook: Callable[..., None]) -> RemovableHandle:
        """Register `hook(models, weights, output_dir)`."""
        return _register(self._save, hook)

    def on_load(self, hook: Callable[..., None]) -> RemovableHandle:
        """Register `hook(models, input_dir)`."""
        return _register(self._load, hook)

    def before_write(
        self, objects: Mapping[str, Any]
    ) -> Callable[[Path], Mapping[str, Mapping[str, Any] | None]] | None:
        """What a save calls, or None without hooks.

        Args:
            objects: all that is saved, by name, among them the models without wrappers or what stands for them.
        """
        if not self._save:
            return None

        def call(path: Path) -> Mapping[str, Mapping[str, Any] | None]:
            saved = _by_model(objects)
            names = [saved[id(accel_parallel.inner_model(model))] for model in self._models]
            states: list[Mapping[str, Any]] = [objects[name].state_dict() for name in names]
            weights = list(states)
            self._run(self._save, weights, os.fspath(path))
            return dict(zip(names, _left(weights, states), strict=True))

        return call

    def before_load(self, objects: Mapping[str, Any]) -> Callable[[Path], Sequence[str]] | None:
        """What a load calls, or None without hooks; `objects` as in `before_write`."""
        if not self._load:
            return None

        def call(path: Path) -> Sequence[str]:
            before, saved = list(self._models), _by_model(objects)
            left = {id(model) for model in self._run(self._load, os.fspath(path))}
            return [saved[id(accel_parallel.inner_model(model))] for model in before if id(model) not in left]

        return call

    def _run(self, hooks: Mapping[int, Callable[..., None]], *arguments: Any) -> list[nn.Module]:
        """Call the hooks; the models that they left in the list."""
        before = list(self._models)
        try:
            for hook in list(hooks.values()):
                hook(self._models, *arguments)
            return list(self._models)
        finally:
            self._models[:] = before


def _register(hooks: OrderedDict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    from torch.utils.hooks import RemovableHandle

    if not callable(hook):
        raise SettingError(f"a hook is a function, and {hook!r} cannot be called")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _left(weights: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | None]:
    """For each model what hooks left of its weights: themselves, others put in their place, or None if popped.

    Raises:
        CheckpointError: some were popped and others put in, so that nothing tells whose they are.
    """
    if len(weights) == len(states):
        return list(weights)
    left = {id(state) for state in weights}
    if left - {id(state) for state in states}:
        raise CheckpointError(
            f"the save hooks left {len(weights)} weights for {len(states)} models, some of them new: either pop "
            "weights, or replace them in their places (weights[0] = ...)."
        )
    return [state if id(state) in left else None for state in states]


def _by_model(objects: Mapping[str, Any]) -> dict[int, str]:
    """The names of models by the identity of the user's own."""
    return {id(getattr(value, "stands_for", value)): name for name, value in objects.items()}
