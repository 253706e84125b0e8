"""What the trackers of libraries share: one object of the library, its run, that everything is reported to."""

from __future__ import annotations

from typing import Any

from accel_state.errors import TrackerError

from .base import GeneralTracker, on_main_process


class LibraryTracker(GeneralTracker):
    """Reports to one object of a library, its run.

    A subclass says how it is opened, and how ended where that is not by `finish()`; the rest is as for any tracker.

    Args:
        run_name: the project.
        kwargs: what the library's own function for opening a run takes besides.
    """

    requires_logging_directory = False

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs
        self._run: Any = None

    @property
    def tracker(self) -> Any:
        """The library's own object.

        Raises:
            TrackerError: `start` was not called, or the tracker has finished.
        """
        if self._run is None:
            raise TrackerError(f"the tracker {self.name!r} is not open: call start() first, and log before finish()")
        return self._run

    @on_main_process
    def start(self) -> None:
        """Begins the run, or goes on with the one that a checkpoint named."""
        self._run, self.run_id = self.open_run()

    def open_run(self) -> tuple[Any, str]:
        """Begin a run, or go on with that of `run_id`: the library's object, and what identifies it."""
        raise NotImplementedError(f"{type(self).__name__} has to define open_run()")

    @on_main_process
    def finish(self) -> None:
        """Ends the run, which waits for what is not yet sent or written."""
        if self._run is not None:
            self.close_run(self._run)
            self._run = None

    def close_run(self, run: Any) -> None:
        """End it."""
        run.finish()
