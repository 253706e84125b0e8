"""All trackers of a run as one: started together, logged to together, and none of them able to stop the training."""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accel_state.errors import TrackerError

from .base import GeneralTracker, is_main_process
from .calling import Caller, Here, InThread
from .images import split_images
from .logger_type import LoggerType
from .null import NullTracker
from .reducing import reduce_over_ranks
from .registry import LOGGER_TYPE_TO_CLASS, TrackerChoice, check_name, filter_trackers, tracker_name
from .snapshots import snapshot, wait_for
from .values import mask_secrets, rows_of

DEFAULT_DIRECTORY = "runs"

logger = logging.getLogger(__name__)

KwargsByTracker = Mapping[str, Mapping[str, Any]]
_NO_KWARGS: Mapping[str, Any] = {}


class TrackerSet:
    """The trackers of one run.

    A tracker that raises or hangs while it starts, logs or finishes is reported once, by a logged warning with its
    name, and never stops the training; the others go on. Each but `jsonl` works in a thread of its own
    (`GeneralTracker.in_background`), which keeps what it could not take yet; `jsonl` writes at once and loses nothing:
    it keeps lines that the disk did not take and tries again. What cannot work at all is raised before training starts:
    unknown names, wrong arguments.

    On processes that do not report, and for a tracker that could not be started, a `NullTracker` stands in its place.

    Args:
        log_with: what `filter_trackers` takes.
        logging_dir: for trackers that write files; None means `runs` in the working directory, which is then logged.
    """

    def __init__(self, log_with: Any = None, logging_dir: str | os.PathLike[str] | None = None) -> None:
        self.log_with = filter_trackers(log_with, logging_dir)
        self.logging_dir = logging_dir
        self.trackers: list[GeneralTracker] = []
        self._callers: dict[str, Caller] = {}  # of the trackers that report here
        self._run_ids: dict[str, str] = {}
        self._failures: Counter[str] = Counter()
        self._told: set[str] = set()

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
        if not isinstance(project_name, str):
            raise TrackerError(f"project_name={project_name!r} is a {type(project_name).__name__}: give a text")
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
            for tracker, caller in self._reporting():
                store = partial(tracker.store_init_configuration, masked)
                if not caller.call("store_init_configuration", store, tracker.timeout_s):
                    logger.warning("the tracker %r has not stored the configuration yet; it goes on", tracker.name)
        if self._callers:
            atexit.register(self.finish)  # after the libraries' own, so before them when the process ends

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: KwargsByTracker | None = None,
        reduce: str | None = None,
    ) -> None:
        """Logs values with every tracker; does nothing where no tracker was asked for.

        Args:
            values: name to value; which kinds are taken depends on the tracker.
            step: the update that they belong to.
            log_kwargs: tracker's name to further arguments of its `log`.
            reduce: "mean", "sum", "min" or "max" of each number over all ranks, which then all call this: one
                collective on the CPU. None logs this process's.

        Raises:
            TrackerError: `values` is no mapping, `log_kwargs` names no tracker, `reduce` is no rule, or the ranks have
                different names to reduce.
        """
        if not isinstance(values, Mapping):
            raise TrackerError(f"log() got a {type(values).__name__}; it takes a mapping from names to values")
        arguments = self._check_kwargs(log_kwargs, "log_kwargs")
        if reduce is not None and self.log_with:
            values = reduce_over_ranks(values, reduce)
        if not self._is_running("log"):
            return
        devices: set[Any] = set()
        taken = None
        for tracker, caller in self._reporting():
            named = arguments.get(tracker.name, _NO_KWARGS)
            if caller.in_background:
                taken = snapshot(values, devices) if taken is None else taken
                function = partial(_log, tracker, dict(taken), step, named, devices)
            else:
                function = partial(tracker.log, dict(values), step=step, **named)
            caller.call("log", function, tracker.patience_s)

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        dataformats: str = "NCHW",
        log_kwargs: KwargsByTracker | None = None,
    ) -> None:
        """Logs pictures with every tracker that shows them; one that does not is named once.

        Args:
            values: name to pictures: a tensor or array of bytes, or of numbers from 0 to 1. A tracker gets them as an
                array of bytes with the axes N, H, W, C, and `dataformats="NHWC"`.
            step: the update that they belong to.
            dataformats: what the axes mean: `H` and `W`, with or without `N` and `C`, in any order.
            log_kwargs: tracker's name to further arguments of its `log_images`.

        Raises:
            TrackerError: pictures do not fit `dataformats`.
        """
        arguments = self._check_kwargs(log_kwargs, "log_kwargs")
        if not self._is_running("log_images") or not self._callers:
            return
        import torch

        pictures = {name: torch.stack(split_images(images, dataformats)).numpy() for name, images in values.items()}
        for tracker, caller in self._reporting():
            if self._has("log_images", tracker):
                named = {"step": step, "dataformats": "NHWC", **arguments.get(tracker.name, _NO_KWARGS)}
                caller.call("log_images", partial(tracker.log_images, pictures, **named), tracker.patience_s)  # type: ignore[attr-defined]

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: KwargsByTracker | None = None,
    ) -> None:
        """Logs a table with every tracker that shows them; one that does not is named once.

        Args:
            table_name: what it is called.
            columns: names of the columns.
            data: rows, each as long as `columns`.
            dataframe: a pandas data frame, instead of `columns` and `data`.
            step: the update that it belongs to.
            log_kwargs: tracker's name to further arguments of its `log_table`.

        Raises:
            TrackerError: there are no rows, or rows as well as a data frame.
        """
        columns, data = rows_of(table_name, columns, data, dataframe)
        arguments = self._check_kwargs(log_kwargs, "log_kwargs")
        if not self._is_running("log_table"):
            return
        for tracker, caller in self._reporting():
            if self._has("log_table", tracker):
                named = {"columns": columns, "data": data, "step": step, **arguments.get(tracker.name, _NO_KWARGS)}
                caller.call("log_table", partial(tracker.log_table, table_name, **named), tracker.patience_s)  # type: ignore[attr-defined]

    def get(self, name: str, unwrap: bool = False) -> Any:
        """The tracker with this name, or with `unwrap` the library's own object, once it has taken what was logged.

        Where this process does not report it is a `NullTracker`, which takes every call.

        Raises:
            TrackerError: no tracker with this name was asked for, or they are not initialised.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                if name in self._callers:
                    self._callers[name].settle(tracker.timeout_s)
                return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]
        names = [tracker_name(entry) for entry in self.log_with]
        if str(name) in names:
            raise TrackerError(f"the tracker {str(name)!r} is not running: initialise the trackers first")
        raise TrackerError(f"there is no tracker {str(name)!r} here; log_with asked for: {', '.join(names) or 'none'}")

    def finish(self) -> None:
        """Finishes every tracker, all at the same time. Harmless without trackers, and a second time.

        Waits until each has written what it got, for its `timeout_s` at most. A process that ends without it does the
        same then.
        """
        reporting = list(self._reporting())
        self._run_ids |= _run_ids(self.trackers)
        start = time.monotonic()
        for tracker, caller in reporting:
            caller.call("finish", tracker.finish, 0)
        for tracker, caller in reporting:
            left = caller.settle(tracker.timeout_s - (time.monotonic() - start))
            if left:
                logger.warning(
                    "the tracker %r has not finished within %g s; the last %d calls may be lost, finish() among them",
                    tracker.name,
                    tracker.timeout_s,
                    left,
                )
        for name, count in self._failures.items():
            if count > 1:
                logger.warning("the tracker %r failed %d times in all", name, count)
        self.trackers, self._callers = [], {}
        self._failures.clear()
        atexit.unregister(self.finish)

    def state_dict(self) -> dict[str, Any]:
        """The ids of the runs, for a checkpoint: plain text, the same for any number of processes."""
        return {"run_ids": self._run_ids | _run_ids(self.trackers)}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Continue the runs of a checkpoint: those that `init` starts later, and running ones that can change over."""
        self._run_ids = dict(state_dict["run_ids"])
        for tracker, caller in self._reporting():
            if tracker.name in self._run_ids:
                caller.call("resume", partial(tracker.resume, self._run_ids[tracker.name]), tracker.timeout_s)

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
        started: list[GeneralTracker] = []

        def start() -> None:
            tracker = make()
            if name in self._run_ids:
                tracker.resume(self._run_ids[name])
            tracker.start()
            started.append(tracker)

        report = partial(self._report, name)
        caller: Caller = InThread(name, kind.timeout_s, report) if kind.in_background else Here(report)
        if not caller.call("start", start, kind.timeout_s):
            report("start", TimeoutError(f"it has not come back for {kind.timeout_s:g} s; the run goes on without it"))
            caller.call("finish", partial(_finish_all, started), 0)  # should it come back later
            return NullTracker(name)
        if not started:
            return NullTracker(name)
        self._callers[name] = caller
        return started[0]

    def _reporting(self) -> Iterator[tuple[GeneralTracker, Caller]]:
        """The trackers that report here, and how to call each."""
        for tracker in self.trackers:
            if tracker.name in self._callers:
                yield tracker, self._callers[tracker.name]

    def _is_running(self, method: str) -> bool:
        if not self.trackers and self.log_with and "running" not in self._told:
            self._told.add("running")
            logger.warning("%s() before the trackers are initialised, or after they finished, records nothing", method)
        return bool(self.trackers)

    def _has(self, method: str, tracker: GeneralTracker) -> bool:
        found = hasattr(tracker, method)
        if not found and f"{tracker.name}.{method}" not in self._told:
            self._told.add(f"{tracker.name}.{method}")
            logger.warning("the tracker %r has no %s(), so it does not record them", tracker.name, method)
        return found

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

    def _report(self, name: str, method: str, error: BaseException) -> None:
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


def _log(
    tracker: GeneralTracker, values: dict[str, Any], step: int | None, named: Mapping[str, Any], devices: set[Any]
) -> None:
    """What the tracker's thread does with a snapshot."""
    wait_for(devices)
    tracker.log(values, step=step, **named)


def _finish_all(started: Sequence[GeneralTracker]) -> None:
    for tracker in started:
        tracker.finish()


def _run_ids(trackers: Sequence[GeneralTracker]) -> dict[str, str]:
    return {tracker.name: tracker.run_id for tracker in trackers if tracker.run_id is not None}
