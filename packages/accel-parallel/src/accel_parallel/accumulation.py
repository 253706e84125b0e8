"""Several micro-batches per update, counted separately for each block of models."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import nn

from accel_state import GradientState, KwargsHandler
from accel_state.errors import PlanError, SettingError
from accel_state.settings import setting

from .arguments import require_models
from .item_weights import ItemWindow
from .sync import pause_of


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients accumulate.

    Args:
        num_steps: micro-batches per update; None takes ACCEL_GRADIENT_ACCUMULATION_STEPS, else 1.
        adjust_scheduler: kept for callers of the peer, where it changes nothing either: a scheduler that steps with the
            optimizer moves with real updates only.
        sync_with_dataloader: the last batch of a loader ends the window, however full it is.
        sync_each_batch: reduce gradients in every micro-batch: slower, but sharded models keep no whole gradients.

    Raises:
        SettingError: fewer than one step.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is None:
            self.num_steps = int(setting("gradient_accumulation_steps"))
        if isinstance(self.num_steps, bool) or not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise SettingError(
                f"gradient accumulation over num_steps={self.num_steps!r} is not possible: give a whole number from 1, "
                "where 1 means an update per batch."
            )

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from their defaults, and always num_steps, whose default is the environment's."""
        return {**super().to_kwargs(), "num_steps": self.num_steps}


class Accumulation:
    """The counters of one training run.

    Args:
        gradient_state: where the settings lie and where optimizers and schedulers read whether this is an update.
    """

    def __init__(self, gradient_state: GradientState) -> None:
        self.gradient_state = gradient_state
        self._blocks: dict[tuple[nn.Module, ...], AccumulationBlock] = {}

    def block(self, models: tuple[nn.Module, ...]) -> AccumulationBlock:
        """The context manager of one micro-batch of `models`; the same tuple of models shares one counter.

        Inside, `gradient_state.sync_gradients` tells whether the window ends here, and backward passes of the models
        are not reduced over ranks unless it does. Entering raises PlanError where a loader's last batch, which ends the
        window, is cut into several blocks.
        """
        block = self._blocks.get(models)
        if block is None:
            require_models("accumulate", models)
            block = self._blocks[models] = AccumulationBlock(self.gradient_state, models)
        return block

    def reset(self) -> None:
        """Begin all windows anew and let go of the models."""
        self._blocks.clear()
        self.gradient_state.sync_gradients = True


class AccumulationBlock:
    """One counter. Re-usable and, for the same models, re-entrant; made by `Accumulation.block`."""

    __slots__ = ("_count", "_ended_pass", "_open", "_outer", "_pauses", "_state", "window")

    def __init__(self, gradient_state: GradientState, models: tuple[nn.Module, ...]) -> None:
        self._state, self._count = gradient_state, 0
        self.window = ItemWindow(models)
        self._outer: list[Any] = []
        self._ended_pass = -1
        self._pauses = [pause for pause in map(pause_of, models) if pause is not None]
        self._open: list[AbstractContextManager[Any] | None] = []

    def __enter__(self) -> None:
        state = self._state
        at_end = state.end_of_dataloader and state.sync_with_dataloader
        if at_end and state.num_steps > 1:
            self._note_end(state.passes)
        window = self.window
        if self._count:
            window.next_step()
        else:
            window.begin()
        self._outer.append(state.window)
        state.window = window
        count = self._count + 1
        is_update = count >= state.num_steps or at_end
        self._count = 0 if is_update else count
        state.sync_gradients = is_update
        if self._pauses:
            self._open.append(None if is_update or state.sync_each_batch else self._pause())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state.window = self._outer.pop()
        if self._pauses:
            pause = self._open.pop()
            if pause is not None:
                pause.__exit__(kind, error, traceback)

    def _note_end(self, passes: int) -> None:
        """The last batch of a loader ends the window, so it can have one block only."""
        if self._ended_pass == passes:
            raise PlanError(
                "a second accumulate block of the same models in the last batch of a loader, where the first one has "
                "ended the accumulation window: each slice of this batch would be an update of its own. Where batches "
                "are cut into slices, use GradientAccumulationPlugin(num_steps=..., sync_with_dataloader=False), which "
                "counts slices alone"
            )
        self._ended_pass = passes

    def _pause(self) -> ExitStack:
        stack = ExitStack()
        for pause in self._pauses:
            stack.enter_context(pause())
        return stack
