"""One rank's process, and what it wrote to stderr last."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping

from accel_launch.plan import RankPlan
from accel_state.errors import LaunchError

TAIL_BYTES = 64 * 1024
TRACEBACK = b"Traceback (most recent call last)"


class Child:
    """A rank's process: leader of a session of its own, so that its whole group can be ended.

    stdin and stdout are the launcher's. So is stderr where there is one rank; with several it passes through us, for
    the first failure to be repeated last. It stays a terminal for the child where the launcher's is one, so that
    progress bars look the same.

    Attributes:
        rank: its number.
        pid: of the process, and of its group.
        stderr: where its stderr is read, or None.
        returncode: None while it lives; then as `subprocess` has it.
        ended_at_s, failed_at_s: on the monotonic clock: when it ended, and when its last traceback appeared.
        was_signalled: whether we asked it to end.
        is_settled: whether its end was dealt with.
    """

    def __init__(
        self, plan: RankPlan, environ: Mapping[str, str], in_child: Callable[[], None], capture_stderr: bool
    ) -> None:
        self.rank = plan.rank
        self.returncode: int | None = None
        self.ended_at_s = float("inf")
        self.failed_at_s = float("inf")
        self.was_signalled = False
        self.is_settled = False
        self._tail = b""
        self.stderr: int | None = None
        theirs: int | None = None
        if capture_stderr:
            self.stderr, theirs = _open_stderr()
        try:
            self._process = subprocess.Popen(
                plan.command,
                env={**environ, **plan.environment},
                stderr=theirs,
                start_new_session=True,
                preexec_fn=in_child,  # noqa: PLW1509  the launcher has one thread
            )
        except OSError as error:
            self.close()
            raise LaunchError(f"{plan.command[0]!r} cannot be started: {error.strerror}") from None
        finally:
            if theirs is not None:
                os.close(theirs)
        self.pid = self._process.pid

    def poll(self) -> bool:
        """Whether it has ended; notes when."""
        if self.returncode is None:
            self.returncode = self._process.poll()
            if self.returncode is not None:
                self.ended_at_s = time.monotonic()
        return self.returncode is not None

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

    def wait(self) -> None:
        """Until it has ended."""
        self._process.wait()
        self.poll()

    def read_stderr(self) -> bytes | None:
        """What it wrote since; b"" for nothing new, None when nobody can write any more."""
        assert self.stderr is not None
        try:
            chunk = os.read(self.stderr, TAIL_BYTES)
        except BlockingIOError:
            return b""
        except OSError:  # a terminal without users reads as an error
            return None
        if not chunk:
            return None
        before = len(self._tail)
        self._tail += chunk
        if TRACEBACK in self._tail[max(0, before - len(TRACEBACK)) :]:
            self.failed_at_s = time.monotonic()
        self._tail = self._tail[-TAIL_BYTES:]
        return chunk

    @property
    def tail(self) -> str:
        """The end of its stderr."""
        return self._tail.decode(errors="replace").replace("\r\n", "\n")

    def close(self) -> None:
        """Stop reading its stderr."""
        if self.stderr is not None:
            os.close(self.stderr)
            self.stderr = None


def _open_stderr() -> tuple[int, int]:
    """Our reading end, which never blocks, and the child's end."""
    if os.isatty(2):
        ours, theirs = _open_terminal()
    else:
        ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    return ours, theirs


def _open_terminal() -> tuple[int, int]:
    import pty
    import termios

    ours, theirs = pty.openpty()
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST  # ours, behind it, turns line ends into what it needs
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    copy_window_size(ours)
    return ours, theirs


def copy_window_size(terminal: int) -> None:
    """Give a terminal the size of the one that our stderr is."""
    import fcntl
    import termios

    size = fcntl.ioctl(2, termios.TIOCGWINSZ, bytes(8))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
