"""Sharding is arithmetic: tables, and properties over all ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from accel_data import BatchSamplerShard
from accel_data.partition import Partition
from accel_state.errors import DataLoaderError


class Unknown(Sampler):
    """A sampler whose order can only be had by iterating it."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))

    def __len__(self):
        return self.length


class Bare:
    """Index lists, and none of the attributes of torch's batch samplers."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


class Sized(Bare):
    batch_size = 3
    drop_last = False


def parts(length, batch_size, world, *, drop_last=False, sampler=SequentialSampler, **how):
    """Each rank's batches of range(length)."""
    order = sampler(range(length)) if sampler is SequentialSampler else sampler(length)
    batches = BatchSampler(order, batch_size, drop_last)
    return [list(BatchSamplerShard(batches, world, rank, **how)) for rank in range(world)]


# Recorded from Accelerate 1.15 with the same arguments.
TABLE = [
    (10, 3, 2, {}, [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 0, 1]]]),
    (10, 3, 2, {"even_batches": False}, [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9]]]),
    (10, 3, 2, {"drop_last": True}, [[[0, 1, 2]], [[3, 4, 5]]]),
    (7, 3, 2, {}, [[[0, 1, 2], [6, 0, 1]], [[3, 4, 5], [2, 3, 4]]]),
    (7, 3, 2, {"even_batches": False}, [[[0, 1, 2], [6]], [[3, 4, 5]]]),
    (2, 3, 2, {}, [[[0, 1, 0]], [[1, 0, 1]]]),
    (1, 2, 3, {}, [[[0, 0]], [[0, 0]], [[0, 0]]]),
    (9, 4, 2, {"split_batches": True}, [[[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]]]),
    (9, 4, 2, {"split_batches": True, "even_batches": False}, [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]),
    (9, 4, 2, {"split_batches": True, "drop_last": True}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    (7, 3, 1, {}, [[[0, 1, 2], [3, 4, 5], [6]]]),
    (0, 3, 2, {}, [[], []]),
]


@pytest.mark.parametrize(("length", "batch_size", "world", "how", "expected"), TABLE)
@pytest.mark.parametrize("sampler", [SequentialSampler, Unknown])
def test_ranks_get_what_accelerate_gives_them(length, batch_size, world, how, expected, sampler):
    assert parts(length, batch_size, world, sampler=sampler, **how) == expected


@given(
    length=st.integers(0, 60),
    batch_size=st.integers(1, 7),
    world=st.integers(1, 5),
    drop_last=st.booleans(),
    even=st.booleans(),
    split=st.booleans(),
)
def test_all_ranks_together_see_the_order(length, batch_size, world, drop_last, even, split):
    size = batch_size * world if split else batch_size
    how = {"drop_last": drop_last, "even_batches": even, "split_batches": split}
    known = parts(length, size, world, **how)
    assert parts(length, size, world, sampler=Unknown, **how) == known

    rounds = max(len(own) for own in known)
    served = [index for step in range(rounds) for own in known if step < len(own) for index in own[step]]
    round_size = size if split else size * world
    if drop_last:
        assert served == list(range(length // round_size * round_size))
    elif even and world > 1:
        assert served == [index % length for index in range(-(-length // round_size) * round_size)]
    else:
        assert served == list(range(length))
    if even or drop_last:
        assert len({len(own) for own in known}) == 1


@given(
    length=st.integers(0, 60),
    batch_size=st.integers(1, 5),
    world=st.integers(1, 4),
    drop_last=st.booleans(),
    even=st.booleans(),
    start=st.integers(0, 60),
)
def test_a_pass_may_begin_anywhere_and_knows_its_end(length, batch_size, world, drop_last, even, start):
    start = min(start, length)
    served = {}
    for rank in range(world):
        for sampler in (SequentialSampler(range(length)), Unknown(length)):
            shard = BatchSamplerShard(BatchSampler(sampler, batch_size, drop_last), world, rank, even_batches=even)
            feed = shard.open(start)
            own = []
            for batch in feed:
                own.append(batch)
                assert (feed.total == len(own)) == (len(own) == shard.num_batches(length - start))
            assert feed.total == len(own) == shard.num_batches(length - start)
            if own:
                assert feed.tail.size == len(own[-1])
            assert served.setdefault(rank, own) == own
    rounds = max(len(own) for own in served.values())
    flat = [i for step in range(rounds) for own in served.values() if step < len(own) for i in own[step]]
    whole = list(range(start, length))
    cut = len(whole) // (batch_size * world) * batch_size * world if drop_last else len(whole)
    assert flat[:cut] == whole[:cut]
    assert flat[cut:] == [i % length for i in range(length, length + len(flat) - cut)]


def test_batches_without_attributes_are_dealt_as_they_come():
    lists = Bare([[0, 1, 2], [3], [4, 5], [6, 7], [8, 9, 10]])
    even = [list(BatchSamplerShard(lists, 2, rank)) for rank in (0, 1)]
    assert even == [[[0, 1, 2], [4, 5], [8, 9, 10]], [[3], [6, 7], [0, 1, 2]]]
    uneven = [list(BatchSamplerShard(lists, 2, rank, even_batches=False)) for rank in (0, 1)]
    assert uneven == [[[0, 1, 2], [4, 5], [8, 9, 10]], [[3], [6, 7]]]


def test_a_short_last_batch_of_a_sized_batch_sampler_is_completed_by_samples():
    lists = Sized([[5, 6, 7], [8, 9, 1], [2]])
    assert [list(BatchSamplerShard(lists, 2, rank)) for rank in (0, 1)] == [
        [[5, 6, 7], [2, 5, 6]],
        [[8, 9, 1], [7, 8, 9]],
    ]


def test_batches_of_an_unknown_batch_sampler_are_split():
    lists = type("Four", (Bare,), {"batch_size": 4})([[0, 1, 2, 3], [4, 5, 6]])
    split = [list(BatchSamplerShard(lists, 2, rank, split_batches=True)) for rank in (0, 1)]
    assert split == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]


def test_own_batches_cost_the_same_at_any_world_size():
    """No rank reads another's part: a feed of the last of 100,000 ranks is cut without touching the rest."""

    order = torch.arange(4 * 100_000 * 3)
    partition = Partition(batch_size=4, world_size=100_000, rank=99_999)
    from accel_data.feeds import KnownFeed

    own = list(KnownFeed(order, partition))
    assert own == [[400_000 * k + 399_996 + i for i in range(4)] for k in range(3)]


@pytest.mark.parametrize(("world", "rank"), [(2, 2), (2, -1), (0, 0)])
def test_a_rank_out_of_range_is_refused(world, rank):
    with pytest.raises(DataLoaderError, match=rf"{rank if world else world}"):
        BatchSamplerShard(BatchSampler(range(4), 2, False), world, rank)


def test_splitting_needs_a_size_that_divides():
    with pytest.raises(DataLoaderError, match=r"batch size \(3\).*number of processes \(2\)"):
        BatchSamplerShard(BatchSampler(range(4), 3, False), 2, 0, split_batches=True)
    with pytest.raises(DataLoaderError, match="Bare has no `batch_size`"):
        BatchSamplerShard(Bare([[0]]), 2, 0, split_batches=True)


def test_a_batch_size_below_one_is_refused():
    with pytest.raises(DataLoaderError, match="batch_size is 0"):
        Partition(batch_size=0)


def test_a_length_that_nobody_knows():
    with pytest.raises(TypeError, match="generator has no length"):
        len(BatchSamplerShard((b for b in [[0]]), 2, 0))
