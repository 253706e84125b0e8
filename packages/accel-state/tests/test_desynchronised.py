"""Ranks that lose each other: each ends within its limit, in an error that names rank and call site.

Mismatches of shape, dtype, tree, operation and order, a missing rank and a killed one are in `test_mismatch.py`.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state import PartialState, Trigger, gather, meeting, wait_for_everyone
from accel_state.collectives import absence
from accel_state.errors import CollectiveMismatchError, ProcessGroupError, RankFailedError
from accel_state.meeting import agree_on_size
from accel_state.polling import until

Ranks = Callable[..., list[Any]]
TIMEOUT = timedelta(seconds=1.5)
LIMIT_S = 8  # the time-out, the grace for others to say that they came, and a busy machine


def ends_with(call: Callable[[], Any]) -> tuple[str, float]:
    """What a call raises, and after how many seconds."""
    start = time.monotonic()
    try:
        call()
    except (CollectiveMismatchError, ProcessGroupError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    raise AssertionError("it should have failed")


def lose_ranks_soon() -> PartialState:
    """A state with a short time-out, and a short wait for others to say that they came."""
    absence._GRACE_S = 1.0
    return PartialState(cpu=True, timeout=TIMEOUT)


def through_a_helper(call: Callable[[], Any]) -> Any:
    return call()


def test_an_infinite_loop_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    def body() -> Any:
        state = lose_ranks_soon()
        if state.process_index == 1:
            return until((tmp_path / "done").exists, 20)
        said = ends_with(lambda: through_a_helper(wait_for_everyone))
        (tmp_path / "done").touch()
        return said

    said, took_s = ranks(body, 2)[0]
    assert took_s < LIMIT_S
    assert re.search(r"wait_for_everyone at (.*test_desynchronised.py:\d+, from ){3}.*: rank 1 never came", said), said


def test_a_stopped_process(ranks: Ranks, tmp_path: Path) -> None:
    def body() -> Any:
        state = lose_ranks_soon()
        if state.process_index == 1:
            (tmp_path / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            return None
        until((tmp_path / "pid").exists, 20)
        time.sleep(0.2)
        said = ends_with(lambda: gather(torch.ones(1)))
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT)
        return said

    said, took_s = ranks(body, 2)[0]
    assert took_s < LIMIT_S
    assert "rank 1 never came. Rank 1 is stopped" in said and re.search(r"gather float32\[\*\] at .*:\d+", said), said


def test_an_exception_on_one_rank_is_told_by_those_that_waited(ranks: Ranks) -> None:
    def body() -> Any:
        if PartialState(cpu=True).process_index == 1:
            raise ZeroDivisionError("the batch is empty")
        gather(torch.ones(1))

    with pytest.raises(RankFailedError) as caught:
        ranks(body, 3)
    text = str(caught.value)
    assert "the batch is empty" in text
    assert re.search(r"gather float32\[\*\] at .*test_desynchronised.py:\d+.*: rank 1 never came. Rank 1 failed", text)


def test_ranks_in_different_groups(ranks: Ranks) -> None:
    def body() -> Any:
        import torch.distributed as dist

        rank = lose_ranks_soon().process_index
        pair = dist.new_group([0, 1], timeout=TIMEOUT)
        if rank == 2:
            return ends_with(lambda: gather(torch.ones(1)))
        if rank == 1:
            return ends_with(lambda: dist.all_reduce(torch.ones(1), group=pair))
        return ends_with(lambda: gather(torch.ones(1)))

    said, took_s = ranks(body, 3)[0]
    assert took_s < LIMIT_S and "rank 1 never came" in said


def test_a_collective_inside_main_process_first(ranks: Ranks) -> None:
    def body() -> Any:
        state = PartialState(cpu=True)
        started = time.monotonic()
        try:
            with state.main_process_first():
                gather(torch.ones(1))
        except ProcessGroupError as error:
            return str(error), time.monotonic() - started

    (inside, first_s), (waiting, second_s) = ranks(body, 2)
    assert max(first_s, second_s) < LIMIT_S
    assert re.search(r"rank 0 called gather .* at .*:\d+ inside main_process_first, entered at .*:\d+: the oth", inside)
    assert "rank 1 waits in main_process_first" in waiting and "failed there: ProcessGroupError" in waiting


def test_those_who_come_second_may_talk_to_each_other(ranks: Ranks) -> None:
    def body() -> Any:
        state = PartialState(cpu=True)
        with state.main_process_first():
            if not state.is_main_process:
                assert gather(torch.tensor([state.process_index])).tolist() == [0, 1]
        return gather(torch.tensor([0])).tolist() if state.is_main_process else None

    assert ranks(body, 2)[0] == [0, 1]


def test_main_process_first_inside_itself_on_one_rank_only(ranks: Ranks) -> None:
    def body() -> Any:
        state = PartialState(cpu=True)
        with state.main_process_first():
            if state.is_main_process:
                with state.main_process_first():
                    time.sleep(0.1)
        return None if state.is_main_process else ends_with(state.main_process_first().__enter__)

    said, took_s = ranks(body, 2)[1]
    assert took_s < LIMIT_S
    assert re.search(
        r"rank 1 waits in .* for rank 0, which went first at .*:\d+, at depth 2 .* rank is at depth 1", said
    )


def test_the_first_rank_dies_in_main_process_first(ranks: Ranks) -> None:
    def body() -> Any:
        state = PartialState(cpu=True)
        state.wait_for_everyone()
        with state.main_process_first():
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailedError, match=r"rank 1 waits in main_process_first at .*:\d+ for rank 0"):
        ranks(body, 2)


def test_the_first_of_a_machine_dies_while_the_store_lives(ranks: Ranks) -> None:
    def body() -> Any:
        rank = int(os.environ["RANK"])
        os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = "2", str(rank % 2)
        state = PartialState(cpu=True)
        state.wait_for_everyone()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 3:
            with state.local_main_process_first():
                return None
        time.sleep(2)

    with pytest.raises(RankFailedError, match=r"rank 3 waits in local_main.* for rank 2, which has ended"):
        ranks(body, 4)


def test_a_trigger_needs_no_barrier(ranks: Ranks) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        trigger, seen = Trigger(), []
        for step in range(4):
            if step == 1 and rank == 1:
                trigger.set()
            seen.append(trigger.check())
        return seen

    assert ranks(body, 2) == [[False, True, False, False]] * 2


def test_a_trigger_of_one_process() -> None:
    trigger = Trigger()
    trigger.set()
    assert (trigger.check(), trigger.check()) == (True, False)


# ---------------------------------------------------------------- meeting


def test_ranks_that_were_told_different_numbers(ranks: Ranks) -> None:
    def body() -> Any:
        if os.environ["RANK"] == "1":
            os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "3"
        return ends_with(lambda: PartialState(cpu=True))

    for said, took_s in ranks(body, 2):
        assert took_s < LIMIT_S
        assert "rank 0 was told that the job has 2 ranks, rank 1 that it has 3" in said, said


@pytest.mark.parametrize("told", [3, 5])
def test_rank_0_was_told_more_than_the_others(ranks: Ranks, told: int) -> None:
    def body() -> Any:
        if os.environ["RANK"] == "0":
            os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(told)
        return ends_with(lambda: PartialState(cpu=True, timeout=timedelta(seconds=20)))

    for rank, (said, took_s) in enumerate(ranks(body, 2)):
        assert took_s < LIMIT_S
        assert f"rank 0 was told that the job has {told} ranks, rank 1 that it has 2: give all of" in said, said
        assert f"rank {rank} of {told if rank == 0 else 2} could not join the others at 127.0.0.1:" in said


def test_a_rank_that_does_not_start(ranks: Ranks) -> None:
    def body() -> Any:
        if os.environ["RANK"] == "1":
            return None
        return ends_with(lambda: PartialState(cpu=True, timeout=timedelta(seconds=1)))

    said, took_s = ranks(body, 2)[0]
    assert took_s < LIMIT_S
    assert re.search(r"rank 0 of 2 could not join the others at .*: rank 1 of 2 never came within 1 s", said), said


def test_ranks_that_do_not_come_to_a_launchers_store_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_GRACE_S", 0.1)
    store, limit = torch.distributed.HashStore(), timedelta(seconds=0.1)
    store.set("size/2", "4")
    for rank in (0, 2):
        with pytest.raises(ProcessGroupError, match=r"ranks 1, 3 of 4 never came within 0.1 s"):
            agree_on_size(store, rank, 4, limit)
    with pytest.raises(ProcessGroupError, match=r"rank 1 of 4 waited there"):
        agree_on_size(torch.distributed.HashStore(), 1, 4, limit)


def test_a_port_in_use_is_named_as_the_cause_on_the_rank_that_needs_it_and_on_those_that_find_the_other(
    ranks: Ranks, tmp_path: Path
) -> None:
    with socket.socket() as other:  # somebody else's server, which never says a word
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])

        def body() -> Any:
            meeting._GRACE_S = 0.2
            os.environ["MASTER_PORT"] = port
            return ends_with(lambda: PartialState(cpu=True, timeout=timedelta(seconds=1)))

        (first, _), (second, _) = ranks(body, 2)
    assert re.search(
        rf"rank 0 of 2 could not join .* at 127.0.0.1:{port}: another program uses that port already",
        first,
    ), first
    assert re.search(
        rf"rank 1 of 2 could not join .*:{port}: .* not the store of the job: .* another MASTER_PORT", second
    ), second


def test_those_who_wait_long_leave_no_noise(ranks: Ranks) -> None:
    def body() -> Any:
        state = PartialState(cpu=True)
        with state.main_process_first():
            time.sleep(2.5 if state.is_main_process else 0)
        os.fsync(2)
        return Path("/proc/self/fd/2").resolve().read_text()

    assert ranks(body, 2) == ["", ""]
