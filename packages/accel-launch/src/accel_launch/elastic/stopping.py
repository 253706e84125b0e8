"""Torch elastic's agent, taught that ranks may be asked to stop: they save and leave, and are not started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar

from accel_launch.signals import STOP_SIGNALS
from accel_state import STOPPED_EXIT_CODE


def stoppable_agent() -> Any:
    """The class of such an agent, whose `exit_code` is that of its process where nothing failed; imports torch."""
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import SignalException

    class StoppableAgent(LocalElasticAgent):
        """Hands signals on to its ranks and waits for them; how long is the launcher's to say, which then kills.

        torch's own would leave the other machines' agents waiting, and start ranks again that left to be resumed later.
        """

        exit_code: ClassVar[int] = 0  # of the one agent of this process, where nothing failed

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._ranks: Mapping[int, int] = {}
            self._asked: int | None = None

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            if self._asked is not None:  # while the ranks of the next attempt met
                raise SignalException("asked to stop", signal.Signals(self._asked))
            started: dict[int, Any] = super()._start_workers(worker_group)
            self._ranks = started
            for signum in STOP_SIGNALS:
                signal.signal(signum, self._hand_on)
            return started

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            if result.state != WorkerState.FAILED:
                return result
            codes = {failure.exitcode for failure in result.failures.values()}
            if STOPPED_EXIT_CODE in codes <= {STOPPED_EXIT_CODE, -signal.SIGTERM}:  # torch ended those that left later
                StoppableAgent.exit_code = STOPPED_EXIT_CODE
                ended = {worker.global_rank: None for worker in worker_group.workers}
                return RunResult(state=WorkerState.SUCCEEDED, return_values=ended)
            if self._asked is not None:
                raise SignalException("asked to stop", signal.Signals(self._asked))
            return result

        def _hand_on(self, signum: int, _frame: FrameType | None) -> None:
            if self._asked is None:
                self._asked = signum
                for pid in self._ranks.values():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signum)

    return StoppableAgent
