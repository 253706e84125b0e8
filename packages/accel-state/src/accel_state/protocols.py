"""The small protocols by which packages meet without importing each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """Anything that a checkpoint can hold: torch's own two-method protocol, satisfied by shape."""

    def state_dict(self) -> dict[str, Any]:
        """A snapshot of everything needed to continue."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Continue from a snapshot."""
        ...


@runtime_checkable
class Parted(Protocol):
    """A model of which each rank holds other parameters, as a pipeline leaves it.

    Its `state_dict`, `load_state_dict`, `named_parameters` and `named_buffers` know this rank's part, by the names of
    the whole.

    Attributes:
        model_class: of the whole model.
        state_names: all names of the whole model's state_dict, in its order.
    """

    model_class: type
    state_names: Sequence[str]
