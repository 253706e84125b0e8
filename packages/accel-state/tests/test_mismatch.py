"""Ranks that do not fit together: the same error on all that came, soon, with rank and call site."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state import (
    PartialState,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    wait_for_everyone,
)
from accel_state.collectives import absence
from accel_state.errors import CollectiveMismatchError, ProcessGroupError, RankFailedError
from accel_state.polling import until

Ranks = Callable[..., list[Any]]

MISMATCHES: dict[str, Callable[[int], Any]] = {
    "trailing shape": lambda rank: gather(torch.zeros(2, 3 + rank)),
    "dtype": lambda rank: gather(torch.zeros(2, dtype=[torch.float32, torch.int64][rank])),
    "tree": lambda rank: gather([torch.zeros(2)] * (1 + rank)),
    "keys": lambda rank: gather({"ab"[rank]: torch.zeros(2)}),
    "dimensions": lambda rank: pad_across_processes(torch.zeros([1] * (1 + rank))),
    "operation": lambda rank: [gather, reduce][rank](torch.zeros(2)),
    "reduction": lambda rank: reduce(torch.zeros(2), ["sum", "mean"][rank]),
    "source": lambda rank: broadcast(torch.zeros(2), from_process=rank),
    "shape": lambda rank: broadcast(torch.zeros(2 + rank)),
    "order": lambda rank: gather_object(1) if rank == 0 else wait_for_everyone(),
    "a long layout": lambda rank: gather([torch.zeros(2)] * 600 + [torch.zeros(2, 1 + rank)]),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_is_the_same_error_on_every_rank_and_leaves_the_group_usable(ranks: Ranks, kind: str) -> None:
    call = MISMATCHES[kind]

    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        try:
            call(rank)
        except CollectiveMismatchError as error:
            return str(error), gather(torch.ones(1)).tolist()

    results = ranks(body, 2)
    assert results[0] == results[1]
    text, after = results[0]
    assert re.search(r"rank 0: .*test_mismatch.py:\d+\n +rank 1: .*test_mismatch.py:\d+\n", text), text
    assert after == [1, 1]


def test_the_shapes_are_named(ranks: Ranks) -> None:
    def body() -> Any:
        try:
            gather({"x": torch.zeros(2, 3 + PartialState(cpu=True).process_index)})
        except CollectiveMismatchError as error:
            return str(error)

    assert "rank 0: gather {'x': float32[*, 3]}" in ranks(body, 2)[1]


def test_equal_ranks_are_named_together(ranks: Ranks) -> None:
    def body() -> Any:
        try:
            gather(torch.zeros(2, 3 + (PartialState(cpu=True).process_index == 1)))
        except CollectiveMismatchError as error:
            return str(error)

    assert "ranks 0, 2: gather float32[*, 3]" in ranks(body, 3)[0]


def test_data_that_cannot_be_sent_ends_the_wait_of_the_others(ranks: Ranks) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        try:
            gather({"a": torch.ones(1), "b": "text" if rank else torch.ones(1)})
        except (TypeError, CollectiveMismatchError) as error:
            return type(error).__name__, str(error)

    (kind0, text0), (kind1, text1) = ranks(body, 2)
    assert kind0 == "CollectiveMismatchError" and "rank 1: gather failed there with TypeError" in text0
    assert kind1 == "TypeError" and "at ['b'] ('text')" in text1


ONE_RANK_FAILS: dict[str, tuple[Callable[[int], Any], str, str]] = {
    "gather_object": (
        lambda rank: gather_object([threading.Lock() if rank else 1]),
        "TypeError: cannot pickle '_thread.lock' object",
        "gather_object",
    ),
    "broadcast_object_list": (
        lambda rank: broadcast_object_list([threading.Lock() if rank else 1], from_process=1),
        "TypeError: cannot pickle '_thread.lock' object",
        "broadcast_object_list from rank 1 of 1 objects",
    ),
    "no list": (
        lambda rank: broadcast_object_list((1,) if rank else [1]),
        "TypeError: broadcast_object_list replaces the items of a list in place, and got a tuple",
        "broadcast_object_list",
    ),
    "no such source": (
        lambda rank: broadcast(torch.ones(1), from_process=7 * rank),
        "ValueError: broadcast: from_process=7 is no such rank; allowed are 0 to 1",
        "broadcast",
    ),
    "a source of objects that is no number": (
        lambda rank: broadcast_object_list([1], from_process="main" if rank else 0),
        "TypeError: broadcast_object_list: from_process='main' is not the number of a rank",
        "broadcast_object_list",
    ),
    "an unknown word": (
        lambda rank: reduce(torch.ones(1), "avg" if rank else "sum"),
        "ValueError: reduction='avg' is not known",
        "reduce",
    ),
    "no maximum": (
        lambda rank: reduce(torch.ones(1, dtype=torch.complex64 if rank else torch.float32), "max"),
        "TypeError: reduce got a tensor of torch.complex64",
        "reduce",
    ),
    "a dimension that is no number": (
        lambda rank: pad_across_processes(torch.ones(1), dim="first" if rank else 0),
        "TypeError: 'str' object cannot be interpreted as an integer",
        "pad_across_processes",
    ),
    "data without an end": (
        lambda rank: gather(endless() if rank else [torch.ones(1)]),
        "ValueError: gather: the data holds itself, at [0]",
        "gather",
    ),
}


def endless() -> list[Any]:
    data: list[Any] = []
    data.append(data)
    return data


@pytest.mark.parametrize("kind", ONE_RANK_FAILS)
def test_what_fails_on_one_rank_ends_all_at_once_and_names_rank_and_cause(ranks: Ranks, kind: str) -> None:
    call, cause, operation = ONE_RANK_FAILS[kind]

    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        try:
            call(rank)
        except Exception as error:  # noqa: BLE001  (the test looks at it)
            return f"{type(error).__name__}: {error}", gather(torch.ones(1)).tolist()

    (told, after_0), (own, after_1) = ranks(body, 2, timeout_s=30)
    assert own.startswith(cause), own
    assert told.startswith("CollectiveMismatchError"), told
    assert re.search(rf"rank 1: {re.escape(operation)} failed there with {re.escape(cause)}.* at .*:\d+", told), told
    assert after_0 == after_1 == [1, 1]


def test_work_that_cannot_be_done_is_not_taken_for_a_missing_rank(ranks: Ranks) -> None:
    def body() -> Any:
        import torch.distributed as dist

        from accel_state.process_group import current_job

        PartialState(cpu=True)
        channel = current_job().channel
        assert channel is not None
        said = []
        for _ in range(2):
            try:
                with channel.begin("reduce of what gloo does not know") as call:
                    channel.all_reduce(torch.ones(2, dtype=torch.uint16), dist.ReduceOp.SUM, call)
            except ProcessGroupError as error:
                said.append(str(error))
        return said

    for rank, (failed, after) in enumerate(ranks(body, 2)):
        assert re.search(rf"reduce of what .* at .*test_mismatch.py:\d+, failed on rank {rank}: ", failed), failed
        assert "never came" not in failed and "is unusable since reduce of what gloo" in after


def test_a_rank_that_does_not_come_is_named_within_the_time_out(ranks: Ranks, tmp_path: Path) -> None:
    def body() -> Any:
        absence._GRACE_S = 1.0
        state = PartialState(cpu=True, timeout=timedelta(seconds=1.5))
        state.wait_for_everyone()
        if state.process_index == 1:
            until(lambda: (tmp_path / "0").exists() and (tmp_path / "2").exists(), 20)
            return None
        start = time.monotonic()
        try:
            state.wait_for_everyone()
        except CollectiveMismatchError as error:
            took_s, said = time.monotonic() - start, str(error)
            (tmp_path / str(state.process_index)).touch()
        try:
            gather(torch.ones(1))
        except ProcessGroupError as error:
            return took_s, said, str(error)

    results = ranks(body, 3)
    assert results[1] is None
    for took_s, said, after in (results[0], results[2]):
        assert 1 < took_s < 6
        assert re.search(r"wait_for_everyone at .*test_mismatch.py:\d+, from .*: rank 1 never came", said), said
        assert "ranks 0, 2 waited" in said
        assert "unusable since wait_for_everyone" in after


def test_a_rank_that_was_killed_is_named(ranks: Ranks) -> None:
    def body() -> Any:
        state = PartialState(cpu=True)
        state.wait_for_everyone()
        if state.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        gather(torch.ones(1))

    with pytest.raises(RankFailedError, match=r"(?s)rank 1 of 2 was killed by SIGKILL.*rank 1 never came"):
        ranks(body, 2)


def test_a_wrong_source_rank_is_refused(ranks: Ranks) -> None:
    def body() -> Any:
        PartialState(cpu=True)
        try:
            broadcast(torch.ones(1), from_process=2)
        except ValueError as error:
            return str(error)

    assert all("from_process=2 is no such rank; allowed are 0 to 1" in said for said in ranks(body, 2))
