"""The mailbox between data loaders and gradient accumulation."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, Protocol


class AccumulationPlugin(Protocol):
    """What a gradient accumulation plugin has to offer here."""

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that were set: any of num_steps, adjust_scheduler, sync_with_dataloader, sync_each_batch."""
        ...


class GradientState:
    """Whether gradients are to be synchronised now, and which loader is being read.

    `GradientState(plugin)` makes a new one; `GradientState()` is the one made last that is still alive, or a new one.
    Objects that hold one keep it: they never look up "the current one".

    Args:
        gradient_accumulation_plugin: its `to_kwargs()` are the accumulation settings; one step by default.
    """

    _made: ClassVar[list[weakref.ref[GradientState]]] = []  # in order; dead ones are dropped when they are met

    sync_gradients: bool
    plugin_kwargs: dict[str, Any]
    window: Any
    """The accumulation window that the block at hand belongs to; None outside of blocks."""

    def __new__(cls, gradient_accumulation_plugin: AccumulationPlugin | None = None) -> GradientState:
        current = cls._live()
        if gradient_accumulation_plugin is None and current is not None:
            return current
        return super().__new__(cls)

    def __init__(self, gradient_accumulation_plugin: AccumulationPlugin | None = None) -> None:
        if "sync_gradients" in vars(self):
            return
        self._fill({} if gradient_accumulation_plugin is None else gradient_accumulation_plugin.to_kwargs())
        GradientState._made.append(weakref.ref(self))

    def _fill(self, plugin_kwargs: dict[str, Any]) -> None:
        self.sync_gradients = True
        self.window = None
        self.plugin_kwargs = plugin_kwargs
        self.passes = 0  # how many times a loader began to be read
        self._loaders: list[weakref.ref[Any]] = []
        self._left: weakref.ref[Any] | None = None
        self._is_xla_gradients_synced = False

    # ---- accumulation

    @property
    def initialized(self) -> bool:
        """Always true: a state exists once it is made."""
        return True

    @property
    def num_steps(self) -> int:
        """Micro-batches per update."""
        return int(self.plugin_kwargs.get("num_steps", 1))

    @property
    def adjust_scheduler(self) -> bool:
        """Whether the scheduler is to step as if there were no accumulation."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", False))

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader always ends an accumulation window."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are reduced on every micro-batch, to save memory."""
        return bool(self.plugin_kwargs.get("sync_each_batch", False))

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether gradients were already reduced on XLA."""
        return self._is_xla_gradients_synced

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, is_synced: bool) -> None:
        self._is_xla_gradients_synced = is_synced

    # ---- loaders

    def _add_dataloader(self, dataloader: Any) -> None:
        """Called by a loader when its iteration begins; held weakly."""
        self._loaders.append(weakref.ref(dataloader))
        self._left = None
        self.passes += 1

    def _remove_dataloader(self, dataloader: Any) -> None:
        """Called by a loader when its iteration ends, also by `break` or an exception."""
        self._left = None
        for index in range(len(self._loaders) - 1, -1, -1):
            if self._loaders[index]() is dataloader:
                del self._loaders[index]
                return

    def _leave_dataloader(self, dataloader: Any) -> None:
        """Called after that where the loop was left with a batch in hand, as by `next(iter(loader))`."""
        self._left = weakref.ref(dataloader)

    @property
    def latest_dataloader(self) -> Any:
        """The loader that gave the batch at hand: the active one, else one whose loop was left since, or None."""
        active = self.active_dataloader
        return self._left() if active is None and self._left is not None else active

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader that is being iterated, or None."""
        loaders = self._loaders
        while loaders:
            loader = loaders[-1]()
            if loader is not None:
                return loader
            loaders.pop()
        return None

    @property
    def dataloader_references(self) -> list[Any]:
        """None, then the loaders that are being iterated, the innermost last."""
        return [None, *(loader for ref in self._loaders if (loader := ref()) is not None)]

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has given its last batch."""
        loader = self.active_dataloader
        return False if loader is None else loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real samples in the active loader's last, padded global batch; -1 without a loader."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    @classmethod
    def _live(cls) -> GradientState | None:
        while cls._made:
            state = cls._made[-1]()
            if state is not None:
                return state
            cls._made.pop()
        return None

    @classmethod
    def _reset_state(cls) -> None:
        """Forget which one is current; the next `GradientState()` makes a new one."""
        cls._made.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.sync_gradients, dict(self.plugin_kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientState:
        return self  # a copied loader reports to the same accumulation

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, end_of_dataloader={self.end_of_dataloader}, "
            f"remainder={self.remainder}, plugin_kwargs={self.plugin_kwargs})"
        )


def _restored(sync_gradients: bool, plugin_kwargs: dict[str, Any]) -> GradientState:
    """A state from another process, without touching the current one; no loader is being read there."""
    state = object.__new__(GradientState)
    state._fill(plugin_kwargs)
    state.sync_gradients = sync_gradients
    return state
