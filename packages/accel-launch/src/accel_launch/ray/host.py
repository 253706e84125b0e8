"""One rank's place in Ray's cluster: an actor that starts its program, hands on what that writes, and signals it.

The rank is a process of its own, as under every other engine: Ray's worker keeps its threads and signal handlers to
itself, and an exit code is an exit code.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING

from accel_launch.ray.places import Place

if TYPE_CHECKING:
    from accel_launch.spawn.port import Port

CHUNK_BYTES = 64 * 1024
_GUARD = "cat >/dev/null; kill -s KILL -- -$0"
"""Outlives the actor by a moment, and ends the rank's process group with it."""


class Host:
    """What the agent calls, from afar. `read` waits in one thread of the actor while the others are answered."""

    def where(self) -> Place:
        """Where this is."""
        import ray

        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), gpus)

    def find_port(self, address: str, number: int | None) -> int:
        """A port of this machine that no other program is given, and that rank 0 can listen on; kept until the end.

        Raises:
            LaunchError: the port is in use.
        """
        from accel_launch.spawn.port import Port

        self._port: Port = Port(address, number)
        return self._port.number

    def start(self, command: tuple[str, ...], environment: dict[str, str], folder: str) -> str | None:
        """Start the rank; what is wrong where that cannot be done.

        Args:
            command: its program.
            environment: what it gets beside the variables of Ray's worker.
            folder: where it runs.
        """
        pipes = [os.pipe(), os.pipe()]
        # Ray's threads do not hear Ctrl-C, and what a thread does not hear, its children do not either
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, [])
        try:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                start_new_session=True,
            )
        except OSError as error:
            return f"{error.filename!r} cannot be used on {os.uname().nodename}: {error.strerror}"
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for _, theirs in pipes:
                os.close(theirs)
        words = ["/bin/sh", "-c", _GUARD, str(self._process.pid)]
        self._guard = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        self._streams: list[int | None] = [ours for ours, _ in pipes]
        self._end = os.pidfd_open(self._process.pid)  # readable once it has ended
        for ours, _ in pipes:
            os.set_blocking(ours, False)
        return None

    def read(self) -> tuple[bytes, bytes, int | None]:
        """What the rank wrote to stdout and stderr, as soon as there is something; its return code, once that is all.

        What its helpers write after its end is not waited for.
        """
        while True:
            select.select([fd for fd in (*self._streams, self._end) if fd is not None], [], [])
            code = self._process.poll()  # before reading: what it wrote is there by then
            out, err = (self._take(index) for index in range(2))
            if out or err:
                return out, err, None
            if code is not None:
                self._close()
                return b"", b"", code

    def _close(self) -> None:
        assert self._guard.stdin is not None
        self._guard.kill()  # first: it takes the closing for our death
        self._guard.wait()
        self._guard.stdin.close()
        for fd in (*self._streams, self._end):
            if fd is not None:
                os.close(fd)

    def _take(self, index: int) -> bytes:
        fd = self._streams[index]
        if fd is None:
            return b""
        try:
            chunk = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return b""
        if not chunk:
            os.close(fd)
            self._streams[index] = None
        return chunk

    def signal(self, number: int) -> None:
        """Signal the process itself; its helpers are its own to end."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End the rank and whatever of its group is left, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
