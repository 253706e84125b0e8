"""Start all ranks of this machine, pass on what they write, and see to it that all of them end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from accel_launch.plan import Ending, LaunchPlan, RankPlan
from accel_launch.signals import STOP_SIGNALS
from accel_launch.spawn.child import Child
from accel_launch.spawn.guard import Guard
from accel_launch.spawn.logs import open_logs
from accel_launch.spawn.port import Port
from accel_launch.spawn.relay import Relay, Stream
from accel_launch.spawn.report import exit_code, failure_message, first_failure, last_words, shell_code
from accel_state import STOPPED_EXIT_CODE


def supervise(plan: LaunchPlan, keeps_words: bool = False) -> Ending:
    """Run a plan to its end; has to be called on the main thread.

    The first rank that fails ends the others: SIGTERM, and SIGKILL to the whole group after `plan.grace_s`. A signal
    to the launcher is handed on once; a second Ctrl-C kills at once.

    Args:
        plan: what to start.
        keeps_words: a single process, too, writes through us, so that its error is known here.

    Returns:
        0 when all ended well, else the exit code of the first failure and its traceback.

    Raises:
        LaunchError: the port is taken or a command cannot be started; whoever was started already is ended.
    """
    is_ours = plan.agent is None and len(plan.ranks) > 1  # else torch, or nobody, listens there
    port = Port(plan.address, plan.port) if plan.address and is_ours else None
    guard = Guard()
    try:
        with _wakeups() as wakeup:
            run = _kind_of_run(plan)(plan, guard, wakeup, keeps_words)
            try:
                run.start(None if port is None else port.number)
                run.wait()
            finally:
                run.end()
            return run.conclude()
    finally:
        guard.dismiss()
        if port is not None:
            port.close()


def _kind_of_run(plan: LaunchPlan) -> type[Run]:
    if plan.agent is None:
        return Run
    from accel_launch.spawn.agent import AgentRun

    return AgentRun


class Run:
    """The processes of one launch and how far it is."""

    def __init__(self, plan: LaunchPlan, guard: Guard, wakeup: int, keeps_words: bool) -> None:
        self.plan = plan
        self.keeps_words = keeps_words
        self.guard = guard
        self.wakeup = wakeup
        self.relay = Relay()
        self.children: list[Child] = []
        self.interrupted_by: signal.Signals | None = None
        self.is_stopping = False  # the ranks were asked to end
        self.is_impatient = False  # a second Ctrl-C
        self.deadline_s: float | None = None  # on the monotonic clock, for those that were asked

    def start(self, port: int | None) -> None:
        """Start all ranks, which meet at `port`."""
        for rank, streams in zip(self.plan.ranks, self.open_streams(), strict=True):
            if port is not None:
                rank = RankPlan(rank.rank, rank.command, {**rank.environment, "MASTER_PORT": str(port)})
            self.start_child(rank, streams)

    def start_child(self, rank: RankPlan, streams: tuple[Stream, Stream] | None) -> None:
        """Start one process."""
        environ = {name: text for name, text in os.environ.items() if name not in self.plan.removed}
        self.children.append(Child(rank, environ, self.guard.enlist(), streams))

    def open_streams(self) -> Sequence[tuple[Stream, Stream] | None]:
        """A pair for each rank; one alone has ours, unless its lines are marked or kept."""
        config, ranks = self.plan.config, self.plan.ranks
        folder, is_marked = config.value("log_dir"), config.value("log_prefix")
        is_plain = folder is None and not is_marked and not self.keeps_words
        if len(ranks) == 1 and is_plain and self.plan.agent is None:
            return [None]
        logs = open_logs(folder, config.value("tee"), ranks[0].rank, len(ranks))
        return [
            self.relay.open(f"[{rank.rank}] ".encode() if is_marked else b"", files)
            for rank, files in zip(ranks, logs, strict=True)
        ]

    def wait(self) -> None:
        while not self._settle():
            left_s = None if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())
            self._turn(left_s)
            if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
                self._kill()

    def end(self) -> None:
        """Whatever happened: nobody lives, and all that was written is ready to be passed on."""
        for child in self.children:
            if not child.is_settled:
                child.kill_group()
                child.wait()
                self.guard.forget(child.pid)
        self.relay.drain()
        self.relay.close()

    def conclude(self) -> Ending:
        """Say who failed first, and pass on what waits."""
        blamed = first_failure(self.children)
        code, words = 0, ""
        if blamed is not None and self.interrupted_by is not None:
            self.relay.outlets[1].put(f"accel launch: ended by {self.interrupted_by.name}\n".encode())
            code = shell_code(blamed.returncode or 0)
        elif blamed is not None:
            code, message = exit_code(self.children, blamed), self.failure_message(blamed)
            words = message.strip() or last_words(blamed.tail)
            if code == STOPPED_EXIT_CODE:
                self.relay.outlets[1].put(f"accel launch: stopped, to be resumed: exit code {code}\n".encode())
            elif not self.plan.config.value("quiet"):
                self.relay.outlets[1].put(message.encode())
        while not (self.relay.is_flushed or self.is_impatient):
            self._turn(None)
        return Ending(code, words)

    def failure_message(self, blamed: Child) -> str:
        """The last words on the console."""
        return failure_message(blamed, self.children)

    def _turn(self, timeout_s: float | None) -> None:
        if self.relay.turn(self.wakeup, timeout_s):
            for number in os.read(self.wakeup, 4096):
                self._handle(signal.Signals(number))

    def _handle(self, signum: signal.Signals) -> None:
        if signum == signal.SIGWINCH:
            self.relay.resize()
        elif signum in STOP_SIGNALS and not self.is_stopping:
            self.interrupted_by = signum
            self._stop(signal.Signals[self.plan.sigterm_as] if signum == signal.SIGTERM else signum)
        elif signum == signal.SIGINT:
            self.is_impatient = True
            self._kill()

    def _settle(self) -> bool:
        """Deal with those who ended; whether all have."""
        for child in self.children:
            if child.is_settled or not child.poll():
                continue
            child.is_settled = True
            if child.returncode != 0 and not self.is_stopping:  # one that stopped was asked to, and so are the others
                self._stop(None if child.returncode == STOPPED_EXIT_CODE else signal.SIGTERM)
            if self.is_stopping:
                child.kill_group()  # what it left behind; after a good end that may be meant to stay
            self.guard.forget(child.pid)
        return all(child.is_settled for child in self.children)

    def _stop(self, signum: int | None) -> None:
        self.is_stopping = True
        self.deadline_s = time.monotonic() + self.plan.grace_s
        self.relay.drain()  # what was written until now is about the cause, what follows about the end
        for child in self.children:
            if signum is not None and not child.poll():
                child.send(signum)

    def _kill(self) -> None:
        self.deadline_s = None
        for child in self.children:
            if not child.is_settled:
                child.was_signalled = True
                child.kill_group()


@contextmanager
def _wakeups() -> Iterator[int]:
    """A file that becomes readable with each signal that matters here; its bytes are the signals' numbers.

    A signal that was ignored when we were started (`nohup`) stays ignored.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = {signum: signal.getsignal(signum) for signum in (*STOP_SIGNALS, signal.SIGCHLD, signal.SIGWINCH)}
    watched = [signum for signum, handler in before.items() if handler != signal.SIG_IGN or signum == signal.SIGCHLD]
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        for signum in watched:
            signal.signal(signum, lambda _signum, _frame: None)  # seen through the file, in the loop
        yield reader
    finally:
        for signum in watched:
            signal.signal(signum, before[signum])
        signal.set_wakeup_fd(previous)
        os.close(reader)
        os.close(writer)
