"""What the ranks write, passed on as it comes: whole lines at once, half ones after a moment, never blocking.

The ranks write without buffers of their own, so that output is live also in files and pipes; a line then arrives in
pieces, and lines of several ranks would mix. Here the pieces of a line are put together again. Where the launcher's
own stream is a terminal, so is each rank's, of the same size: progress bars look the same.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Sequence

from accel_launch.spawn.logs import Log

CHUNK_BYTES = 64 * 1024
WRITE_BYTES = 4096  # a pipe that can take anything takes as much without blocking
MAX_PENDING_BYTES = 1024 * 1024  # beyond it the ranks have to wait for whoever reads us
PARTIAL_LINE_S = 0.05
TAIL_BYTES = 64 * 1024
TRACEBACK = b"Traceback (most recent call last)"


class Outlet:
    """One of our own streams; what cannot be written yet waits here."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._pending = bytearray()
        self._is_closed = False

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def put(self, text: bytes) -> None:
        if not self._is_closed:
            self._pending += text

    def write(self) -> None:
        """Write what fits; called when the stream can take something."""
        try:
            del self._pending[: os.write(self.fd, self._pending[:WRITE_BYTES])]
        except BlockingIOError:  # some terminals hand out streams that do not wait
            return
        except OSError:  # nobody reads us any more: the ranks go on, and the exit code tells the rest
            self._is_closed = True
            self._pending.clear()


class Stream:
    """stdout or stderr of one rank.

    Attributes:
        fd: our end; None once nobody can write to it any more.
        theirs: the rank's end, until it was handed over.
        tail: the end of what was written.
        failed_at_s: on the monotonic clock, when the last traceback appeared.

    Args:
        outlet: where it is passed on to.
        prefix: put in front of each line there.
        log: a file that gets it too.
    """

    def __init__(self, outlet: Outlet, prefix: bytes = b"", log: Log | None = None) -> None:
        self.outlet = outlet
        self._prefix = prefix
        self._log = log
        self._is_line_begun = False
        self.fd: int | None
        self.fd, self.theirs = _open_terminal(outlet.fd) if os.isatty(outlet.fd) else os.pipe()
        os.set_blocking(self.fd, False)
        self.tail = b""
        self.failed_at_s = float("inf")
        self._partial = b""
        self._partial_until_s = float("inf")

    def read(self) -> bool:
        """Take what is there; whether there may be more."""
        if self.fd is None:
            return False
        try:
            chunk = os.read(self.fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # a terminal without users reads as an error
            chunk = b""
        if not chunk:
            self.close()
            return False
        fresh = self.tail[-len(TRACEBACK) + 1 :] + chunk
        if TRACEBACK in fresh:
            self.failed_at_s = time.monotonic()
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        if self._log is not None:
            self._log.write(chunk)
        self._pass_on(chunk)
        return True

    def _pass_on(self, chunk: bytes) -> None:
        lines, newline, rest = (self._partial + chunk).rpartition(b"\n")
        self._put(lines + newline)
        if newline or not self._partial:
            self._partial_until_s = time.monotonic() + PARTIAL_LINE_S if rest else float("inf")
        self._partial = rest

    def _put(self, text: bytes) -> None:
        if self._prefix and text:
            begun, self._is_line_begun = self._is_line_begun, not text.endswith(b"\n")
            lines = re.findall(b"[^\n]*\n|[^\n]+", text)  # a progress bar's \\r begins no line
            text = b"".join(line if begun and not index else self._prefix + line for index, line in enumerate(lines))
        self.outlet.put(text)

    def pass_on_partial_line(self, now_s: float = float("inf")) -> None:
        """Let a line go that has waited long enough for its end: a prompt, a progress bar."""
        if self._partial and now_s >= self._partial_until_s:
            self._put(self._partial)
            self._partial, self._partial_until_s = b"", float("inf")

    @property
    def due_at_s(self) -> float:
        """When a partial line has waited long enough."""
        return self._partial_until_s

    def close(self) -> None:
        """Stop reading; what waits is passed on."""
        self.pass_on_partial_line()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        if self._log is not None:
            self._log.close()


class Relay:
    """All streams of all ranks."""

    def __init__(self) -> None:
        self.outlets = (Outlet(1), Outlet(2))
        self.streams: list[Stream] = []

    def open(self, prefix: bytes = b"", logs: Sequence[Log | None] = (None, None)) -> tuple[Stream, Stream]:
        """Streams for stdout and stderr of one more rank."""
        pair = Stream(self.outlets[0], prefix, logs[0]), Stream(self.outlets[1], prefix, logs[1])
        self.streams += pair
        return pair

    def turn(self, wakeup: int, timeout_s: float | None) -> bool:
        """Wait until something can be read or written or the time is up, and do it; whether `wakeup` can be read."""
        now_s = time.monotonic()
        waits_s = [stream.due_at_s - now_s for stream in self.streams if stream.due_at_s != float("inf")]
        if timeout_s is not None:
            waits_s.append(timeout_s)
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        for outlet in self.outlets:
            if outlet.num_pending:
                poll.register(outlet.fd, select.POLLOUT)
        readable = {stream.fd: stream for stream in self.streams if stream.outlet.num_pending < MAX_PENDING_BYTES}
        for fd in readable:
            if fd is not None:
                poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(max(0.0, min(waits_s)) * 1000 if waits_s else None)]
        for fd in ready:
            if fd in readable:
                readable[fd].read()
        for stream in self.streams:
            stream.pass_on_partial_line(time.monotonic())
        for outlet in self.outlets:
            if outlet.fd in ready:
                outlet.write()
        return wakeup in ready

    def drain(self) -> None:
        """Read all that the ranks wrote until now; no more than pipes hold, since some never stop writing."""
        for stream in self.streams:
            for _ in range(MAX_PENDING_BYTES // CHUNK_BYTES):
                if not stream.read():
                    break

    @property
    def is_flushed(self) -> bool:
        """Whether everything that was read has been written."""
        return not any(outlet.num_pending for outlet in self.outlets)

    def resize(self) -> None:
        """Tell the ranks' terminals the size that ours has now."""
        for stream in self.streams:
            if stream.fd is not None and os.isatty(stream.outlet.fd):
                _copy_window_size(stream.outlet.fd, stream.fd)

    def close(self) -> None:
        """Stop reading."""
        for stream in self.streams:
            stream.close()


def _open_terminal(like: int) -> tuple[int, int]:
    import pty
    import termios

    ours, theirs = pty.openpty()
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST  # the terminal behind it turns line ends into what it needs
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    _copy_window_size(like, ours)
    return ours, theirs


def _copy_window_size(source: int, target: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(target, termios.TIOCSWINSZ, fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(8)))
