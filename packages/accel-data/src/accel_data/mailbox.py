"""What a loader tells the gradient accumulation about itself."""

from __future__ import annotations

from typing import Any


class DataLoaderStateMixin:
    """A loader that is known to its `gradient_state` while it is being iterated.

    A loop of your own calls `begin()` before the first batch and `end()` after the last, in a `finally`, and sets
    `end_of_dataloader` together with the last batch.
    """

    gradient_state: Any = None
    end_of_dataloader: bool = False
    remainder: int = -1

    def reset(self) -> None:
        """Forget the end of the pass before."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """A pass begins: gradient accumulation looks at this loader from now on."""
        self.reset()
        if self.gradient_state is not None:
            self.gradient_state._add_dataloader(self)  # noqa: SLF001

    def end(self) -> None:
        """The pass is over, also by `break` or an exception."""
        if self.gradient_state is not None:
            self.gradient_state._remove_dataloader(self)  # noqa: SLF001
