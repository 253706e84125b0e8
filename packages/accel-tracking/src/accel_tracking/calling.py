"""How a tracker's methods are called so that none of them can stop the training: in a thread of its own, or here.

The training thread hands calls over and goes on. A call that raises is reported; one that does not come back leaves the
training alone, and what is handed over meanwhile waits in a queue of `CAPACITY` calls. What finds it full is dropped
and counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from accel_state.errors import TrackerError

CAPACITY = 1000
"""Calls that wait for a tracker at most."""

Report = Callable[[str, BaseException], None]
"""Takes the name of a method and what went wrong in it."""


class Caller(Protocol):
    """Calls one tracker's methods, one after the other, in the order given."""

    in_background: bool

    def call(self, method: str, function: Callable[[], object], patience_s: float) -> bool:
        """Call, and say whether it was done when this returned, well or badly.

        Args:
            method: what the report calls it.
            patience_s: how long to wait for it at most; not at all while earlier calls wait themselves.
        """

    def settle(self, timeout_s: float) -> int:
        """Wait until every call is done; returns how many are not.

        A call that has run for longer than its tracker may take is not waited for any more.
        """


class Here:
    """Calls on the training thread: for trackers that are quick and cannot hang."""

    in_background = False

    def __init__(self, report: Report) -> None:
        self._report = report

    def call(self, method: str, function: Callable[[], object], patience_s: float) -> bool:  # noqa: ARG002
        """Call now."""
        try:
            function()
        except Exception as error:  # noqa: BLE001  whatever a tracker raises, training goes on
            self._report(method, error)
        return True

    def settle(self, timeout_s: float) -> int:  # noqa: ARG002
        """Nothing is ever left."""
        return 0


class InThread:
    """Calls in a thread that belongs to one tracker.

    Args:
        name: the tracker's, for the thread.
        limit_s: how long one call may take before it counts as one that hangs.
        report: told once that a call hangs, and of every call that raises or is dropped.
    """

    in_background = True

    def __init__(self, name: str, limit_s: float, report: Report) -> None:
        self._limit_s = limit_s
        self._report = report
        self._calls: SimpleQueue[tuple[str, Callable[[], object]]] = SimpleQueue()
        self._handed_over = 0  # written by the training thread alone
        self._done = 0  # written by the tracker's thread alone, under the condition
        self._progress = threading.Condition()
        self._running: tuple[str, float] | None = None  # method and start of the call that runs
        self._told: tuple[str, float] | None = None
        # a daemon: a library that hangs must not keep the process from ending
        threading.Thread(target=self._run, name=f"accel-tracker-{name}", daemon=True).start()

    def call(self, method: str, function: Callable[[], object], patience_s: float) -> bool:
        """Hand over, and wait where nothing else waits already."""
        waiting = self._handed_over - self._done
        if waiting:
            self._report_if_it_hangs()
        if waiting >= CAPACITY:
            self._report(method, TrackerError(f"it is {waiting} calls behind, and no more are kept"))
            return False
        self._handed_over += 1
        self._calls.put((method, function))
        return not waiting and patience_s > 0 and self._wait(patience_s)

    def settle(self, timeout_s: float) -> int:
        """Wait until the queue is empty, the time is over, or it is plain that the call that runs hangs."""
        deadline = time.monotonic() + timeout_s
        while self._done < self._handed_over:
            running, now = self._running, time.monotonic()
            left = deadline - now if running is None else min(deadline, running[1] + self._limit_s) - now
            if left <= 0:
                break
            done = self._done
            with self._progress:
                self._progress.wait_for(lambda before=done: self._done > before, left)  # type: ignore[misc]
        return self._handed_over - self._done

    def _wait(self, seconds: float) -> bool:
        with self._progress:
            return self._progress.wait_for(lambda: self._done >= self._handed_over, seconds)

    def _report_if_it_hangs(self) -> None:
        running = self._running
        if running is None or running is self._told:
            return
        if time.monotonic() - running[1] > self._limit_s:
            self._told = running
            self._report(running[0], TimeoutError(f"it has not come back for {self._limit_s:g} s"))

    def _run(self) -> None:
        while True:
            method, function = self._calls.get()
            self._running = (method, time.monotonic())
            try:
                function()
            except BaseException as error:  # noqa: BLE001  a library's SystemExit must not end this thread
                self._report(method, error)
            self._running = None
            del function  # and with it what was logged
            with self._progress:
                self._done += 1
                self._progress.notify_all()
