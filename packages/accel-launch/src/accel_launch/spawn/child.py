"""One rank's process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping

from accel_launch.plan import RankPlan
from accel_launch.spawn.relay import Stream
from accel_state.errors import LaunchError


class Child:
    """A rank's process: leader of a session of its own, so that its whole group can be ended.

    Args:
        plan: its command and variables.
        environ: what it inherits beside those.
        in_child: called in the new process before its program starts.
        streams: for its stdout and stderr; None leaves it those of the launcher. stdin is the launcher's.

    Attributes:
        rank: its number.
        pid: of the process, and of its group.
        returncode: None while it lives; then as `subprocess` has it.
        ended_at_s: on the monotonic clock.
        was_signalled: whether we asked it to end.
        is_settled: whether its end was dealt with.

    Raises:
        LaunchError: the program cannot be started.
    """

    def __init__(
        self,
        plan: RankPlan,
        environ: Mapping[str, str],
        in_child: Callable[[], None],
        streams: tuple[Stream, Stream] | None,
    ) -> None:
        self.rank = plan.rank
        self.returncode: int | None = None
        self.ended_at_s = float("inf")
        self.was_signalled = False
        self.is_settled = False
        self._stderr = streams[1] if streams else None
        stdout, stderr = (stream.theirs for stream in streams) if streams else (None, None)
        try:
            self._process = subprocess.Popen(
                plan.command,
                env={**environ, **plan.environment},
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=in_child,  # noqa: PLW1509  the launcher has one thread
            )
        except OSError as error:
            raise LaunchError(f"{plan.command[0]!r} cannot be started: {error.strerror}") from None
        finally:
            for stream in streams or ():
                os.close(stream.theirs)
        self.pid = self._process.pid

    def poll(self) -> bool:
        """Whether it has ended; notes when."""
        if self.returncode is None:
            self.returncode = self._process.poll()
            if self.returncode is not None:
                self.ended_at_s = time.monotonic()
        return self.returncode is not None

    def wait(self) -> None:
        """Until it has ended."""
        self._process.wait()
        self.poll()

    def send(self, signum: int) -> None:
        """Signal the process itself; its helpers are its own to end."""
        self.was_signalled = True
        self._process.send_signal(signum)

    def kill_group(self) -> None:
        """End it and whatever of its group is left, at once."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    @property
    def failed_at_s(self) -> float:
        """On the monotonic clock, when its last traceback appeared, if any."""
        return self._stderr.failed_at_s if self._stderr else float("inf")

    @property
    def tail(self) -> str:
        """The end of its stderr."""
        return self._stderr.tail.decode(errors="replace") if self._stderr else ""
