"""The small protocols by which packages meet without importing each other."""

from __future__ import annotations

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
