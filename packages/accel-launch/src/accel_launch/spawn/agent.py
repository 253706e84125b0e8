"""An agent that starts the ranks, torch elastic's or Ray's, under our supervision: their streams, and its end.

The ranks are the agent's, not ours. So it, or each of them, opens the files that they need through this process's
entries in /proc: a stream for a rank's output, and the guard's pipe, where a rank here lists its process group.
"""

from __future__ import annotations

import json
import os

from accel_launch.plan import LaunchPlan, RankPlan
from accel_launch.spawn.child import Child
from accel_launch.spawn.guard import Guard
from accel_launch.spawn.relay import Stream
from accel_launch.spawn.report import describe, last_words
from accel_launch.spawn.supervisor import Run


class AgentRun(Run):
    """The agent of this machine, with its ranks' streams."""

    def __init__(self, plan: LaunchPlan, guard: Guard, wakeup: int, keeps_words: bool) -> None:
        super().__init__(plan, guard, wakeup, keeps_words)
        self.rank_streams: list[tuple[Stream, Stream]] = []
        self._results, self._result_writer = os.pipe()

    def start(self, port: int | None) -> None:
        """Start the agent; the port is its to choose."""
        assert self.plan.agent is not None and port is None
        mine = f"/proc/{os.getpid()}/fd"
        environment = dict(self.plan.agent.environment)
        self.rank_streams = [pair for pair in self.open_streams() if pair is not None]
        for index, (out, err) in enumerate(self.rank_streams):
            environment[f"_ACCEL_OUT_{index}"] = f"{mine}/{out.theirs}"
            environment[f"_ACCEL_ERR_{index}"] = f"{mine}/{err.theirs}"
        environment["_ACCEL_GUARD"] = f"{mine}/{self.guard.writer}"
        environment["_ACCEL_RESULT"] = f"{mine}/{self._result_writer}"
        self.start_child(RankPlan(0, self.plan.agent.command, environment), None)

    def end(self) -> None:
        """As for ranks of our own; then what they opened is closed."""
        super().end()
        for stream in (stream for pair in self.rank_streams for stream in pair):
            os.close(stream.theirs)
        os.close(self._result_writer)

    def failure_message(self, blamed: Child) -> str:
        """Which rank failed first by the agent's word, and what it wrote."""
        with os.fdopen(self._results, encoding="utf-8") as lines:
            told = [json.loads(line) for line in lines]
        if not told:
            code = blamed.returncode or 0
            return f"accel launch: the agent ended: {describe(code)}\n" if code < 0 else ""  # else it said so
        rank, index, returncode = (told[-1][key] for key in ("rank", "stream", "returncode"))
        world_size = self.plan.config.value("num_processes")
        line = f"accel launch: rank {rank} of {world_size} failed first: {describe(returncode)}"
        words = ""
        if index < len(self.rank_streams):
            words = last_words(self.rank_streams[index][1].tail.decode(errors="replace"))
        return f"\n{line}\n{words}\n"
