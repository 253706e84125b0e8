"""A learning-rate scheduler that moves with real updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from accel_state import GradientState, PartialState, warn_user

Unit = Literal["update", "sample"]


class AcceleratedScheduler:
    """A scheduler that moves when, and only when, the optimizer made an update.

    Args:
        scheduler: any object with `step`, as torch's schedulers.
        optimizers: one or several wrapped optimizers; a step that one of them skipped does not count.
        step_with_optimizer: False makes each call exactly one notch, whatever the optimizer does.
        split_batches: whether the loader's batch size is the global one, so that an update is one notch in any unit.
        per: how far an update moves the schedule. "update": one notch, on any number of processes. "sample": as many
            notches as there are processes, for schedules that were counted in batches of one process. None is
            "sample", as in the peer, and warns if that makes a difference.
        num_processes: of the data-parallel group; by default all.
        gradient_state: tells whether this is an update; the current one if None.

    Raises:
        ValueError: a unit that does not exist, or one that cannot have an effect.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        per: Unit | None = None,
        num_processes: int | None = None,
        gradient_state: GradientState | None = None,
    ) -> None:
        if per not in (None, "update", "sample"):
            raise ValueError(f"per={per!r} is not a unit of a schedule: use 'update' or 'sample'.")
        if per is not None and not step_with_optimizer:
            raise ValueError(
                f"per={per!r} has no effect with step_with_optimizer=False, where a call is one notch: leave one out."
            )
        self.scheduler = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.gradient_state = GradientState() if gradient_state is None else gradient_state
        if num_processes is None:
            num_processes = PartialState().num_processes
        self._notches = 1 if split_batches or per == "update" or not step_with_optimizer else num_processes
        if self._notches > 1 and per is None:
            warn_user(
                f"this learning-rate scheduler moves {self._notches} notches per update, one for each of the "
                f"{self._notches} processes, so a schedule that was counted in updates is compressed. Say which unit "
                "it counts in: prepare_scheduler(scheduler, per='update') moves one notch per update, per='sample' "
                "keeps this without the warning.",
            )

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move the schedule if the optimizers made an update; arguments are passed on.

        A schedule with a `total_steps` is not moved past it by the notches that other processes account for.
        """
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        if self._notches == 1:
            self.scheduler.step(*args, **kwargs)
            return
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(self._notches):
            if total is None or self.scheduler.last_epoch < total:
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> Any:
        """The learning rates in use, one per parameter group."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> Any:
        """The inner scheduler's own computation of the current rates."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """The inner scheduler's print."""
        return self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The inner scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a snapshot."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("scheduler")
        if inner is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(inner, name)
