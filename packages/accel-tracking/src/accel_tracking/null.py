"""The tracker that stands where no tracker is: it takes every call and does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .base import GeneralTracker


class NullTracker(GeneralTracker):
    """Stands for a tracker on processes that do not report, and for one that could not be started.

    Every attribute exists and every method takes any call, so code that was written for the main process
    (`get_tracker("wandb").log_images(...)`, `get_tracker("tensorboard", unwrap=True).add_text(...)`) runs everywhere.
    It is false in a boolean context, like the nothing that it stands for.

    Args:
        name: the name of the tracker that it stands for.
    """

    requires_logging_directory = False

    def __init__(self, name: str) -> None:
        super().__init__(_blank=True)
        self.name = name

    @property
    def tracker(self) -> NullTracker:
        """Itself: what stands for the library's own object does nothing either."""
        return self

    def __getattr__(self, attribute: str) -> NullTracker:
        if attribute.startswith("__"):  # protocols (copying, pickling, arrays) must not find what is not there
            raise AttributeError(f"{type(self).__name__!r} has no attribute {attribute!r}")
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> NullTracker:
        """Takes any call, since attributes of the real object may be methods."""
        return self

    def __getitem__(self, _key: Any) -> NullTracker:
        return self

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Forgets it: `run.summary["best"] = 3` is a call like any other."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> NullTracker:
        return self

    def __exit__(self, *_error: object) -> None:
        """Lets exceptions through."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"NullTracker({self.name!r})"
