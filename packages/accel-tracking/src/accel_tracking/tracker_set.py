"""All trackers of a run as one: started together, logged to together, and none of them able to stop the training."""

from __future__ import annotations

import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_state.errors import TrackerError

from .base import GeneralTracker, is_main_process
from .logger_type import LoggerType
from .null import NullTracker
from .registry import LOGGER_TYPE_TO_CLASS, TrackerChoice, check_name, filter_trackers, tracker_name
from .values import mask_secrets

DEFAULT_DIRECTORY = "runs"

logger = logging.getLogger(__name__)

KwargsByTracker = Mapping[str, Mapping[str, Any]]
_NO_KWARGS: Mapping[str, Any] = {}


class TrackerSet:
    """The trackers of one run.

    A tracker that raises while it starts, logs or finishes is reported once, by a logged warning with its name, and
    never stops the training; the others go on. That includes `jsonl`, which loses nothing by it: it keeps the lines
    and tries again. What cannot work at all is raised before training starts: unknown names, wrong arguments.

    On processes that do not report, and for a tracker that could not be started, a `NullTracker` stands in its place.

    Args:
        log_with: what `filter_trackers` takes.
        logging_dir: for trackers that write files; None means `runs` in the working directory, which is then logged.
    """

    def __init__(self, log_with: Any = None, logging_dir: str | os.PathLike[str] | None = None) -> None:
        self.log_with = filter_trackers(log_with, logging_dir)
        self.logging_dir = logging_dir
        self.trackers: list[GeneralTracker] = []
        self._run_ids: dict[str, str] = {}
        self._failures: Counter[str] = Counter()
        self._told_not_running = False

    def init(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: KwargsByTracker | None = None
    ) -> None:
        """Makes and starts the trackers, each with the run id of a checkpoint that was loaded before.

        Args:
            project_name: the first argument of each tracker's constructor.
            config: recorded by each tracker, with the values of keys that look like credentials masked.
            init_kwargs: tracker's name to further arguments of its constructor; entries of trackers that are not
                used are left alone, so that one script serves several.

        Raises:
            TrackerError: the trackers run already, `init_kwargs` names no tracker, or arguments do not fit.
        """
        if self.trackers:
            raise TrackerError("the trackers are initialised already: finish() them before a second init()")
        if config is not None and not isinstance(config, Mapping):
            raise TrackerError(f"config is a {type(config).__name__}; it has to be a mapping, for example vars(args)")
        arguments = self._check_kwargs(init_kwargs, "init_kwargs")
        self._failures.clear()
        makers = [
            self._maker(entry, project_name, arguments) for entry in self.log_with
        ]  # all checked before one starts
        self.trackers = [self._start(entry, make) for entry, make in zip(self.log_with, makers, strict=True)]
        if config is not None:
            masked = mask_secrets(config)
            for tracker in self.trackers:
                self._guard(tracker, "store_init_configuration", masked)

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: KwargsByTracker | None = None
    ) -> None:
        """Logs values with every tracker; does nothing where no tracker was asked for.

        Args:
            values: name to value; which kinds are taken depends on the tracker.
            step: the update that they belong to.
            log_kwargs: tracker's name to further arguments of its `log`.

        Raises:
            TrackerError: `values` is no mapping, or `log_kwargs` names no tracker.
        """
        if not isinstance(values, Mapping):
            raise TrackerError(f"log() got a {type(values).__name__}; it takes a mapping from names to values")
        arguments = self._check_kwargs(log_kwargs, "log_kwargs")
        for tracker in self.trackers:
            self._guard(tracker, "log", values, step=step, **arguments.get(tracker.name, _NO_KWARGS))
        if not self.trackers and self.log_with and not self._told_not_running:
            self._told_not_running = True
            logger.warning("log() before the trackers are initialised, or after they finished, records nothing")

    def get(self, name: str, unwrap: bool = False) -> Any:
        """The tracker with this name, or with `unwrap` the library's own object.

        Where this process does not report it is a `NullTracker`, which takes every call.

        Raises:
            TrackerError: no tracker with this name was asked for, or they are not initialised.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]
        names = [tracker_name(entry) for entry in self.log_with]
        if str(name) in names:
            raise TrackerError(f"the tracker {str(name)!r} is not running: initialise the trackers first")
        raise TrackerError(f"there is no tracker {str(name)!r} here; log_with asked for: {', '.join(names) or 'none'}")

    def finish(self) -> None:
        """Finishes every tracker. Harmless without trackers, and a second time."""
        trackers, self.trackers = self.trackers, []
        for tracker in trackers:
            self._run_ids |= _run_ids([tracker])
            self._guard(tracker, "finish")
        for name, count in self._failures.items():
            if count > 1:
                logger.warning("the tracker %r failed %d times in all", name, count)
        self._failures.clear()

    def state_dict(self) -> dict[str, Any]:
        """The ids of the runs, for a checkpoint: plain text, the same for any number of processes."""
        return {"run_ids": self._run_ids | _run_ids(self.trackers)}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Continue the runs of a checkpoint: those that `init` starts later, and running ones that can change over."""
        self._run_ids = dict(state_dict["run_ids"])
        for tracker in self.trackers:
            if tracker.name in self._run_ids and not isinstance(tracker, NullTracker):
                self._guard(tracker, "resume", self._run_ids[tracker.name])

    def _maker(
        self, entry: TrackerChoice, project_name: str, kwargs: Mapping[str, Mapping[str, Any]]
    ) -> Callable[[], GeneralTracker]:
        """A function that constructs the tracker, whose arguments are checked now, on every process."""
        if isinstance(entry, GeneralTracker):
            return lambda: entry
        kind: Any = LOGGER_TYPE_TO_CLASS[entry] if isinstance(entry, str) else entry
        positional = [project_name, *([str(self._directory(kind.name))] if kind.requires_logging_directory else [])]
        named = kwargs.get(kind.name, _NO_KWARGS)
        try:
            inspect.signature(kind).bind(*positional, **named)
        except TypeError as error:
            raise TrackerError(
                f"the tracker {kind.name!r} cannot be made with init_kwargs {dict(named)}: {error}"
            ) from error
        return lambda: kind(*positional, **named)

    def _start(self, entry: TrackerChoice, make: Callable[[], GeneralTracker]) -> GeneralTracker:
        name = tracker_name(entry)
        kind = LOGGER_TYPE_TO_CLASS[entry] if isinstance(entry, str) else entry
        if kind.main_process_only and not is_main_process():
            return NullTracker(name)
        try:
            tracker = make()
            if name in self._run_ids:
                tracker.resume(self._run_ids[name])
            tracker.start()
        except Exception as error:  # noqa: BLE001  whatever a tracker raises, training goes on
            self._report(name, "start", error)
            return NullTracker(name)
        return tracker

    def _directory(self, name: str) -> Path:
        if self.logging_dir is None:
            self.logging_dir = Path.cwd() / DEFAULT_DIRECTORY
            logger.warning("the tracker %r needs a directory; without logging_dir it is %s", name, self.logging_dir)
        return Path(self.logging_dir)

    def _check_kwargs(self, kwargs: KwargsByTracker | None, what: str) -> KwargsByTracker:
        if not kwargs:
            return {}
        known = {*LOGGER_TYPE_TO_CLASS, *LoggerType.list(), *map(tracker_name, self.log_with)}
        for name in kwargs:
            check_name(str(name), known, what)
        return {str(name): arguments for name, arguments in kwargs.items()}

    def _guard(self, tracker: GeneralTracker, method: str, /, *args: Any, **kwargs: Any) -> None:
        try:
            getattr(tracker, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  whatever a tracker raises, training goes on
            self._report(tracker.name, method, error)

    def _report(self, name: str, method: str, error: Exception) -> None:
        self._failures[name] += 1
        if self._failures[name] == 1:
            logger.warning(
                "the tracker %r failed in %s() and training goes on without what it missed; further failures are "
                "counted, not shown: %s: %s",
                name,
                method,
                type(error).__name__,
                error,
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )


def _run_ids(trackers: Sequence[GeneralTracker]) -> dict[str, str]:
    return {tracker.name: tracker.run_id for tracker in trackers if tracker.run_id is not None}
