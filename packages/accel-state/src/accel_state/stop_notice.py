"""Stopping before the time is over: a signal or a time limit that all ranks see at the same update.

Torch-free until ranks agree.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from accel_state.callsite import warn_user

if TYPE_CHECKING:
    from accel_state.collectives.channel import Channel

_SLICE = timedelta(seconds=1)  # a wait in slices lets Ctrl-C through
_FAREWELL = timedelta(seconds=3)


class StopNotice:
    """Whether the run has to stop, asked once per update on every rank and answered alike on all.

    SIGTERM, SIGUSR1 (Slurm's `--signal`), `request()` and a time limit count, on any one rank. The signals are listened
    to from the first question on: until then they end the process as always. A handler that was there before is
    called too.

    Args:
        time_limit_s: seconds from now on; None for no limit.
    """

    def __init__(self, time_limit_s: float | None = None) -> None:
        self._deadline_s = None if time_limit_s is None else time.monotonic() + time_limit_s
        self._is_wanted = False  # by this rank
        self._is_decided = False  # by all
        self._poll: _Poll | None = None
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self._is_listening = False

    def request(self) -> None:
        """Make all ranks stop; any one may call it. Costs nothing."""
        self._is_wanted = True

    def check(self) -> bool:
        """Whether to stop now. Every rank asks equally often; True stays True.

        The answer of several ranks is what they wanted at their last question, so that nobody waits for it.

        Raises:
            CollectiveMismatchError: a rank did not ask for as long as the group's time-out.

        Cost: 4 bytes per rank on the CPU, sent beside the update; the first question makes a group for them. On one
        process a look at a flag.
        """
        if not self._is_listening:
            self._listen()
        if not self._is_decided:
            is_wanted = self._is_wanted or (self._deadline_s is not None and time.monotonic() >= self._deadline_s)
            self._is_decided = is_wanted if self._poll is None else self._poll.vote(is_wanted)
        return self._is_decided

    def close(self) -> None:
        """Listen no more. After a decision to stop, signals stay unheard: whoever sent them may repeat them."""
        if self._poll is not None:
            self._poll.close()
            self._poll = None
        for signum, handler in self._before.items():
            if signal.getsignal(signum) == self._on_signal:  # Python's own end would drop a handler, not this
                signal.signal(signum, signal.SIG_IGN if self._is_decided else handler)
        self._is_decided = self._is_decided or self._is_wanted
        self._before = {}

    def _listen(self) -> None:
        from accel_state.collectives.shared import current_channel

        self._is_listening = True
        channel = current_channel()
        if channel is not None:
            self._poll = _Poll(channel)
        if threading.current_thread() is not threading.main_thread():
            warn_user(
                "should_stop was first asked for outside the main thread, where Python takes no signals: only a time "
                "limit ends this run early. Ask for it in the main thread"
            )
            return
        for name in ("SIGTERM", "SIGUSR1"):
            if hasattr(signal, name):  # Windows has no SIGUSR1
                signum = getattr(signal, name)
                self._before[signum] = signal.getsignal(signum)
                signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        before = self._before.get(signum)
        if os.getpid() != self._process:  # a forked helper is not the run
            signal.signal(signum, signal.SIG_DFL if before is None else before)
            os.kill(os.getpid(), signum)
            return
        self._is_wanted = True
        if callable(before):
            before(signum, frame)


class _Poll:
    """One question after the other to all ranks, each answered at the next: its reduction runs beside the update."""

    def __init__(self, channel: Channel) -> None:
        import torch
        import torch.distributed as dist

        self._channel = channel
        # of its own: collectives of other threads must not come between
        self._group = dist.new_group(backend="gloo", timeout=channel.timeout)
        self._votes = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._number = 0

    def vote(self, is_wanted: bool) -> bool:
        """Take in what this rank wants; returns whether anybody wanted it at the last question."""
        import torch.distributed as dist

        if self._work is not None:
            self._wait(self._work)
            if self._votes.item():
                self._work = None
                return True
        self._number += 1
        self._votes.fill_(is_wanted)
        self._work = dist.all_reduce(self._votes, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return False

    def close(self) -> None:
        """Let the last question end, whose answer nobody needs; ranks that failed do not answer it."""
        if self._work is not None:
            with suppress(RuntimeError):
                self._work.wait(_FAREWELL)

    def _wait(self, work: Any) -> None:
        from accel_state.collectives import absence

        deadline_s = time.monotonic() + self._channel.timeout.total_seconds()
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if work.is_completed() or time.monotonic() >= deadline_s:
                    absence.raise_absent(
                        self._channel.store,
                        self._channel.rank,
                        self._channel.world_size,
                        number=f"{self._number} of should_stop",
                        text="should_stop",
                        limit_s=self._channel.timeout.total_seconds(),
                        error=error,
                    )
