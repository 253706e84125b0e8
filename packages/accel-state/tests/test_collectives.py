"""Collectives on two and three ranks: values."""

from __future__ import annotations

import multiprocessing
import threading
from collections import namedtuple
from collections.abc import Callable
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
from accel_state.errors import AccelError, CannotPadNestedTensorWarning

Ranks = Callable[..., list[Any]]
Point = namedtuple("Point", ["x", "y"])


def same_on_all(results: list[Any]) -> Any:
    assert all(result == results[0] for result in results), results
    return results[0]


def test_world_of_one_returns_what_it_was_given(fresh_state: None) -> None:
    PartialState(cpu=True)
    data = {"a": torch.ones(1), "b": "text"}
    for result in (
        gather(data),
        broadcast(data),
        reduce(data),
        pad_across_processes(data),
        gather_object(data),  # type: ignore[comparison-overlap]
    ):
        assert result is data
    assert broadcast_object_list([1]) == [1]
    wait_for_everyone()


def test_gather_of_every_kind_of_tensor(ranks: Ranks) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        tree = {
            "unequal": torch.full((rank + 1, 2), float(rank)),
            "scalar": torch.tensor(rank),
            "bool": torch.tensor([rank == 1]),
            "bf16": torch.full((2,), rank, dtype=torch.bfloat16),
            "nothing": torch.empty(0, 3),
            "only on one": torch.ones(3 * rank, dtype=torch.int8),
            "transposed": (torch.arange(4).view(2, 2) + 10 * rank).T,
            "fp8": torch.full((1,), rank, dtype=torch.float8_e4m3fn),
            "with gradient": torch.ones(1, requires_grad=True) * rank,
        }
        got = gather(tree)
        assert list(got) == list(tree)
        assert {key: value.dtype for key, value in got.items()} == {key: value.dtype for key, value in tree.items()}
        assert got["nothing"].shape == (0, 3)
        return {key: value.float().tolist() for key, value in got.items()}

    assert same_on_all(ranks(body, 3)) == {
        "unequal": [[0, 0], [1, 1], [1, 1], [2, 2], [2, 2], [2, 2]],
        "scalar": [0, 1, 2],
        "bool": [0, 1, 0],
        "bf16": [0, 0, 1, 1, 2, 2],
        "nothing": [],
        "only on one": [1] * 9,
        "transposed": [[0, 2], [1, 3], [10, 12], [11, 13], [20, 22], [21, 23]],
        "fp8": [0, 1, 2],
        "with gradient": [0, 1, 2],
    }


@pytest.mark.parametrize("rows", [1, 5000])  # in the slot, as a message
def test_gather_small_and_large_nested_and_unequal(ranks: Ranks, rows: int) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        equal = torch.arange(rows * 3).view(rows, 3) + rank
        alone = gather(equal)
        point = gather(Point([equal], (torch.full((rows + rank,), rank, dtype=torch.int16),)))
        assert isinstance(point, Point) and isinstance(point.y, tuple)
        assert torch.equal(point.x[0], alone) and alone.shape == (2 * rows, 3)
        assert torch.equal(alone, torch.cat([equal - rank, equal - rank + 1]))
        assert point.y[0].tolist() == [0] * rows + [1] * (rows + 1)
        alone.zero_()  # the result is the caller's own
        return int(gather(torch.ones(2)).sum())

    assert ranks(body, 2) == [4, 4]


def test_gather_where_one_rank_fits_the_slot_and_the_other_does_not(ranks: Ranks) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        return gather({"a": torch.ones(1 + 4000 * rank), "b": torch.ones(2)})["a"].sum().item()

    assert ranks(body, 2) == [4002, 4002]


def test_gather_of_more_leaves_than_a_slot_has_room_for(ranks: Ranks) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        got = gather([torch.full((1 + index % 2 * rank,), index) for index in range(600)])
        return [value.tolist() for value in got]

    assert same_on_all(ranks(body, 2)) == [[index] * (2 + index % 2) for index in range(600)]


def test_objects(ranks: Ranks) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        long = "x" * (20_000 * rank)
        shared = [rank, {"rank": rank}]
        assert broadcast_object_list(shared, from_process=1) is shared
        received = broadcast_object_list([long], from_process=1)
        return (
            gather_object([rank, "a"]),
            gather_object((rank,)),
            gather_object({"rank": rank}),
            gather_object("ab"),
            [len(one) for one in gather_object([long])],
            shared,
            len(received[0]),
        )

    assert same_on_all(ranks(body, 2)) == (
        [0, "a", 1, "a"],
        [0, 1],
        [{"rank": 0}, {"rank": 1}],
        ["ab", "ab"],
        [0, 20_000],
        [1, {"rank": 1}],
        20_000,
    )


@pytest.mark.parametrize("size", [3, 5000])
def test_broadcast_leaves_the_input_alone(ranks: Ranks, size: int) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        tree = {"a": torch.full((size,), rank, dtype=torch.bfloat16), "b": [torch.tensor(rank == 1), torch.empty(0)]}
        got = broadcast(tree, from_process=1)
        assert tree["a"].unique().tolist() == [rank]
        assert got["a"].dtype == torch.bfloat16 and got["b"][1].shape == (0,)
        return got["a"].unique().tolist(), got["a"].shape, got["b"][0].item()

    assert same_on_all(ranks(body, 3)) == ([1], (size,), True)


@pytest.mark.parametrize("size", [2, 5000])
def test_reduce(ranks: Ranks, size: int) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        tree = {
            "int": torch.full((size,), rank + 1),
            "float": [torch.full((size, 2), rank + 0.5), torch.tensor(float(rank))],
            "bool": torch.tensor([True, rank == 1]),
            "bf16": torch.full((3,), rank, dtype=torch.bfloat16),
            "fp8": torch.full((1,), rank, dtype=torch.float8_e4m3fn),
        }
        kept = tree["int"].clone()
        got = {word: reduce(tree, word) for word in ("sum", "mean", "max")}
        assert reduce(tree, "none") is tree and torch.equal(tree["int"], kept)
        assert got["sum"]["int"].dtype == torch.int64 and got["mean"]["int"].dtype == torch.float32
        assert got["mean"]["bf16"].dtype == torch.bfloat16 and got["max"]["bool"].dtype == torch.bool
        assert got["sum"]["float"][0].shape == (size, 2) and got["sum"]["float"][1].shape == ()
        assert torch.equal(reduce(kept), got["mean"]["int"])  # the default
        return {
            word: [
                value["int"].unique().tolist(),
                value["float"][0].unique().tolist(),
                value["float"][1].item(),
                value["bool"].tolist(),
                value["bf16"].tolist(),
                value["fp8"].item(),
            ]
            for word, value in got.items()
        }

    assert same_on_all(ranks(body, 2)) == {
        "sum": [[3], [2.0], 1.0, [2, 1], [1.0] * 3, 1.0],
        "mean": [[1.5], [1.0], 0.5, [1.0, 0.5], [0.5] * 3, 0.5],
        "max": [[2], [1.5], 1.0, [True, True], [1.0] * 3, 1.0],
    }


def test_reduce_refuses_other_words_and_warns_once_of_scale(ranks: Ranks) -> None:
    def body() -> Any:
        import warnings

        PartialState(cpu=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            first, second = reduce(torch.ones(1), "sum", 2.0), reduce(torch.ones(1), "sum", 2.0)
        try:
            reduce(torch.ones(1), "average")
        except ValueError as error:
            return first.item(), second.item(), [str(one.message) for one in caught], str(error)

    first, second, warned, refused = same_on_all(ranks(body, 2))
    assert (first, second) == (2.0, 2.0)
    assert warned == ["scale=2.0 of reduce has an effect on XLA only"]
    assert "'average'" in refused and "sum, mean, max, none" in refused


def test_pad_across_processes(ranks: Ranks) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        tensor = torch.ones(1 + rank, 2 - rank, dtype=torch.int64)
        return [
            pad_across_processes({"a": tensor}, pad_index=7)["a"].tolist(),
            pad_across_processes(tensor, dim=-1, pad_index=7, pad_first=True).tolist(),
            pad_across_processes(torch.tensor(3)).item(),
            pad_across_processes(torch.ones(2), dim=1).tolist(),
        ]

    assert ranks(body, 2) == [
        [[[1, 1], [7, 7]], [[1, 1]], 3, [1, 1]],
        [[[1], [1]], [[7, 1], [7, 1]], 3, [1, 1]],
    ]


def test_a_group_that_the_user_made_is_adopted(ranks: Ranks) -> None:
    def body() -> Any:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        state = PartialState(cpu=True)
        assert gather(torch.tensor([state.process_index])).tolist() == [0, 1]
        state.destroy_process_group()
        return dist.is_initialized(), state.initialized

    assert ranks(body, 2) == [(False, False)] * 2


def test_without_a_launcher_machines_of_an_adopted_group_are_told_by_host_name(ranks: Ranks) -> None:
    def body() -> Any:
        import os

        import torch.distributed as dist

        dist.init_process_group("gloo")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        return tuple(PartialState(cpu=True).topology)[:6]

    assert ranks(body, 2) == [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]


def test_a_new_group_after_the_old_one_was_destroyed(ranks: Ranks) -> None:
    def body() -> Any:
        sums = []
        for _ in range(3):
            state = PartialState(cpu=True)
            sums.append(int(gather(torch.ones(1)).sum()))
            state.destroy_process_group()
        return sums

    assert ranks(body, 2) == [[2, 2, 2]] * 2


def test_a_reset_keeps_the_group(ranks: Ranks) -> None:
    def body() -> Any:
        state = PartialState(cpu=True)
        PartialState._reset_state()
        again = PartialState()
        return again.num_processes, state.process_index, int(gather(torch.ones(1)).sum())

    assert ranks(body, 2) == [(2, 0, 2), (2, 1, 2)]


def test_a_collective_in_a_forked_process_is_refused(ranks: Ranks) -> None:
    def body() -> Any:
        PartialState(cpu=True)
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)

        def child() -> None:
            try:
                gather(torch.ones(1))
            except AccelError as error:
                sender.send(str(error))

        process = context.Process(target=child)
        process.start()
        said = receiver.recv() if receiver.poll(20) else "nothing"
        process.join()
        return said

    assert all("gather was called in a forked process" in said for said in ranks(body, 2))


def test_one_process_under_a_launcher_has_a_group_of_one(ranks: Ranks) -> None:
    def body() -> Any:
        import torch.distributed as dist

        state = PartialState(cpu=True)
        tensor = torch.ones(1)
        return state.use_distributed, dist.is_initialized(), gather(tensor) is tensor, state.backend

    assert ranks(body, 1) == [(False, True, True, "gloo")]


# ---------------------------------------------------------------- unchecked, sparse, spread, nested, threads


def test_uniform_collectives_give_the_same(ranks: Ranks) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        fp8 = torch.full((2,), rank, dtype=torch.float8_e4m3fn)
        tree = {"x": torch.full((2, 3), rank), "y": [torch.tensor(float(rank)), fp8], "z": torch.empty(0, 2)}
        for one in (tree, tree["x"], fp8, torch.empty(0), torch.tensor(rank), tree["x"].T):
            assert str(gather(one, uniform=True)) == str(gather(one))
        values = {"x": torch.full((2, 3), float(rank)), "n": torch.tensor(rank)}
        for word in ("sum", "mean", "max"):
            assert str(reduce(values, word, uniform=True)) == str(reduce(values, word))
        return True

    assert ranks(body, 2) == [True, True]


def test_sparse_tensors_are_gathered_sparse(ranks: Ranks) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        dense = torch.zeros(1 + rank, 3, 2)
        dense[rank, 1] = torch.tensor([1.0, 2.0]) + rank
        doubled = torch.sparse_coo_tensor([[0, 0]], [1.0, 1.0], (2,))  # not coalesced
        got = gather({"hybrid": dense.to_sparse(2), "full": dense.to_sparse(), "dense": dense, "doubled": doubled})
        empty = gather(torch.zeros(2, 2).to_sparse() if rank else torch.eye(2).to_sparse())
        assert got["hybrid"].is_sparse and got["hybrid"].is_coalesced()
        assert torch.equal(got["hybrid"].to_dense(), got["dense"]) and torch.equal(got["full"].to_dense(), got["dense"])
        assert got["doubled"].to_dense().tolist() == [2, 0, 2, 0]
        return empty.to_dense().tolist()

    assert same_on_all(ranks(body, 2)) == [[1, 0], [0, 1], [0, 0], [0, 0]]


def test_a_dtensor_comes_back_whole(ranks: Ranks) -> None:
    def body() -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        rank = PartialState(cpu=True).process_index
        whole = torch.arange(4.0).view(2, 2)
        spread = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
        got = gather([spread, torch.tensor([rank])])
        try:
            broadcast(spread)
        except TypeError as error:
            refused = str(error)
        return got[0].tolist(), got[1].tolist(), refused

    values, plain, refused = same_on_all(ranks(body, 2))
    assert values == [[0, 1], [2, 3]] and plain == [0, 1]
    assert "is a DTensor; send .full_tensor()" in refused


def test_a_nested_tensor_is_not_padded_and_says_so(ranks: Ranks) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
        with pytest.warns(CannotPadNestedTensorWarning, match="to_padded_tensor"):
            got = pad_across_processes({"n": nested, "x": torch.ones(1 + rank)})
        return got["n"] is nested, got["x"].tolist()

    assert ranks(body, 2) == [(True, [1, 0]), (True, [1, 1])]


def test_two_threads_take_turns(ranks: Ranks) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        failed: list[BaseException] = []

        def work() -> None:  # each rank's threads come in some order; equal calls may meet in any of them
            try:
                for _ in range(100):
                    assert gather(torch.full((600,), rank)).tolist() == [0] * 600 + [1] * 600
            except BaseException as error:  # noqa: BLE001  (goes to the test)
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [str(error) for error in failed]

    assert ranks(body, 2) == [[], []]


@pytest.mark.parametrize("size", [1, 9000])  # in the slots, and by an all-reduce
@pytest.mark.parametrize(
    ("dtype", "value", "reduction", "expected"),
    [
        (torch.uint8, 200, "mean", 200.0),
        (torch.int8, 100, "mean", 100.0),
        (torch.int32, 2**30, "mean", float(2**30)),
        (torch.bool, True, "mean", 1.0),
        (torch.int16, 1000, "sum", 2000),
        (torch.uint16, 1000, "sum", 2000),
        (torch.uint32, 7, "max", 7),
    ],
)
def test_reducing_integers_of_any_width(ranks, size, dtype, value, reduction, expected) -> None:
    def body():
        PartialState(cpu=True)
        total = reduce(torch.full((size,), value, dtype=dtype), reduction)
        return total.dtype, set(total.tolist())

    for got, values in ranks(body, 2):
        assert values == {expected}
        assert got == (torch.float32 if reduction == "mean" else dtype)


@pytest.mark.parametrize("size", [3, 9000])  # in the slots, and by an all-reduce
@pytest.mark.parametrize(
    ("dtype", "values", "reduction", "expected"),
    [
        (torch.float16, (60000.0, 60000.0, 60000.0), "mean", 60000.0),  # the sum is beyond float16
        (torch.float16, (2048.0, 1.0, 1.0), "sum", 2050.0),  # 2048 + 1 is 2048 in float16
        (torch.bfloat16, (256.0, 1.0, 1.0), "sum", 258.0),
        (torch.bfloat16, (256.0, 1.0, 1.0), "max", 256.0),
        (torch.float16, (2048.0, 1.0, 1.0), "max", 2048.0),
    ],
)
def test_halves_are_added_in_single_precision(ranks, size, dtype, values, reduction, expected) -> None:
    def body():
        rank = PartialState(cpu=True).process_index
        total = reduce(torch.full((size,), values[rank], dtype=dtype), reduction)
        return total.dtype, total.unique().tolist()

    assert ranks(body, 3) == [(dtype, [expected])] * 3


def test_what_cannot_be_reduced_is_said_before_anything_is_sent(ranks) -> None:
    def body():
        PartialState(cpu=True)
        said = []
        for tensor, reduction in (
            (torch.ones(2, dtype=torch.complex64), "max"),
            (torch.ones(2).to(torch.uint64), "sum"),
        ):
            try:
                reduce(tensor, reduction)
            except TypeError as error:
                said.append(str(error))
        return said, reduce(torch.ones(1), "sum").item()

    for said, total in ranks(body, 2):
        assert "no maximum" in said[0]
        assert "torch.int64" in said[1]
        assert total == 2.0
