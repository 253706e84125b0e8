"""Nobody outlives the launcher, however it dies.

The kernel can end a child together with its parent, but not the child's own children (loader workers, helpers). So a
second process holds the reading end of a pipe whose writing end only the launcher has: when that closes, it kills
every process group that is still listed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


class Guard:
    """The process that waits for the launcher's death. Children list themselves, see `enlist`.

    Attributes:
        writer: the end of the pipe that a child writes its number to, a line.
    """

    def __init__(self) -> None:
        reader, self.writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _wait_for_the_end(reader, self.writer)
        os.close(reader)

    def enlist(self) -> Callable[[], None]:
        """For a child to call between its start and its program, leader of its group: the guard then knows it.

        On Linux the child is also tied to the launcher directly, for the case that the guard was killed with it.
        """
        tie = _tie_to_parent()
        launcher = os.getpid()

        def in_child() -> None:
            self._tell(os.getpid())
            tie()
            if os.getppid() != launcher:
                os._exit(128 + signal.SIGKILL)  # it died before the tie held

        return in_child

    def forget(self, pid: int) -> None:
        """A child has ended and what it left, if anything, may stay."""
        self._tell(-pid)

    def _tell(self, pid: int) -> None:
        try:
            os.write(self.writer, b"%d\n" % pid)
        except BrokenPipeError:  # somebody killed it: the run does not depend on it
            return

    def dismiss(self) -> None:
        """End the guard; what is still listed dies."""
        os.close(self.writer)
        os.waitpid(self._pid, 0)


def _tie_to_parent() -> Callable[[], object]:
    if sys.platform != "linux":
        return lambda: None
    import ctypes

    prctl, set_parent_death_signal = ctypes.CDLL(None).prctl, 1
    return lambda: prctl(set_parent_death_signal, signal.SIGKILL)


def _wait_for_the_end(reader: int, writer: int) -> None:
    """The guard's whole life; runs in the forked process and never returns."""
    try:
        os.setsid()  # out of reach of the terminal's Ctrl-C
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        os.close(writer)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):  # a reader of the launcher's output must see its end
            os.dup2(nowhere, standard)
        groups: set[int] = set()
        with os.fdopen(reader, "rb") as lines:
            for line in lines:
                pid = int(line)
                groups = groups | {pid} if pid > 0 else groups - {-pid}
        for group in groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue
    finally:
        os._exit(0)
