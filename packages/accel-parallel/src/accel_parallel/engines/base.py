"""What an engine has to offer: the loop's five verbs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from accel_state.protocols import Stateful


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The objects of a training run that belong together, before or after they are prepared."""

    models: tuple[nn.Module, ...] = ()
    optimizers: tuple[Any, ...] = ()
    schedulers: tuple[Any, ...] = ()


class Engine(Protocol):
    """Who runs backward and the update. `NativeEngine` leaves them to torch; others bring their own loop."""

    def prepare(self, objects: Prepared) -> Prepared:
        """All objects in one go, each in its place; those that are prepared already come back themselves."""
        ...

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of one micro-batch."""
        ...

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A block whose gradients stay on the rank."""
        ...

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip before an update; the norm before clipping."""
        ...

    def state(self, prepared: Prepared) -> Mapping[str, Stateful]:
        """What a checkpoint holds, by name."""
        ...
