"""Orders that are computed: bijections without pattern, at any place at once, the same everywhere."""

import tracemalloc
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from accel_data import PermutationSampler, SampleOrder, prepare_data_loader
from accel_data.permutation import MAX_LENGTH
from accel_state.errors import DataLoaderError, DataStateError


@given(length=st.integers(0, 700), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_an_order_is_a_bijection_however_it_is_read(length, seed, epoch):
    order = SampleOrder(length, seed, epoch)
    run = order[:]
    assert sorted(run.tolist()) == list(range(length))
    assert [order[i] for i in range(length)] == run.tolist() == list(order)
    assert torch.equal(order[length // 3 : length : 2], run[length // 3 :: 2])
    positions = torch.randint(max(length, 1), (3, 4)) if length else torch.empty(3, 0, dtype=torch.int64)
    assert torch.equal(order.at(positions), run[positions])


@pytest.mark.parametrize("length", [2**31, 10**12, 2**62 + 1, MAX_LENGTH])
def test_long_orders_stay_inside_and_agree(length):
    order = SampleOrder(length, seed=3)
    ends = [0, 1, length // 2, length - 2, length - 1]
    found = order.at(torch.tensor(ends))
    assert [order[i] for i in ends] == found.tolist()
    assert order[-1] == order[length - 1]
    run = order[length - 5000 :]
    assert bool((run >= 0).all() and (run < length).all())
    assert len(set(run.tolist())) == 5000


RECORDED = [
    [5, 0, 1, 4, 6, 9, 8, 3, 2, 7],
    [1, 4, 6, 2, 0, 8, 9, 3, 5, 7],
    [226997052690, 185934851421, 345674762141],
]


def test_an_order_is_the_same_everywhere_and_for_ever():
    assert SampleOrder(10, seed=7)[:].tolist() == RECORDED[0]
    assert SampleOrder(10, seed=7, epoch=1)[:].tolist() == RECORDED[1]
    assert SampleOrder(10**12, seed=7)[:3].tolist() == RECORDED[2]


def test_what_is_no_length_or_position_is_refused():
    with pytest.raises(DataLoaderError, match=f"0 to {MAX_LENGTH}"):
        SampleOrder(2**63, seed=0)
    with pytest.raises(IndexError, match="position 5 of an order of 5"):
        SampleOrder(5, seed=0)[5]


# ---- without pattern. Seeds are fixed, so these either hold or do not; bounds are 4 standard deviations.


def deviation(counts, expected):
    """By how many standard deviations a chi-square statistic is too large."""
    freedom = counts.numel() - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("length", [2, 3, 5, 8, 13, 16, 31, 64, 100])
def test_every_value_is_as_likely_at_every_position(length):
    trials = 3000
    counts = torch.zeros(length, length)
    for seed in range(trials):
        counts[torch.arange(length), SampleOrder(length, seed)[:]] += 1
    expected = trials / length
    statistic = float(((counts - expected) ** 2 / expected).sum()) * (length - 1) / length  # rows and columns are fixed
    freedom = (length - 1) ** 2
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("length", [10_000, 1_000_000, 10**12])
def test_neighbours_are_unrelated(length):
    for seed in range(5):
        run = SampleOrder(length, seed)[: min(length, 100_000)].double() / length
        centred = run - run.mean()
        correlation = float((centred[1:] * centred[:-1]).mean() / centred.var()) * len(run) ** 0.5
        assert abs(correlation) < 4
        steps = torch.histc((run[1:] - run[:-1]) % 1.0, 64, 0, 1)
        assert deviation(steps, (len(run) - 1) / 64) < 4


def test_epochs_and_seeds_are_unrelated():
    orders = [SampleOrder(1000, seed, epoch)[:].tolist() for seed in range(5) for epoch in range(5)]
    fixed = [
        sum(a == b for a, b in zip(one, other, strict=True)) for one in orders for other in orders if one is not other
    ]
    assert 0.8 < sum(fixed) / len(fixed) < 1.2  # two random orders agree at one position on average
    assert max(fixed) < 8
    assert Counter(map(tuple, orders)).most_common(1)[0][1] == 1


# ---- in loaders


class Endless(Dataset):
    def __init__(self, length):
        self.length = length

    def __getitem__(self, index):
        return index

    def __len__(self):
        return self.length


@pytest.mark.parametrize("world", [1, 3])
def test_a_loader_reads_it_by_arithmetic(world):
    data = Endless(25)
    loaders = [
        prepare_data_loader(
            DataLoader(data, batch_size=2, sampler=PermutationSampler(data, seed=5)),
            num_processes=world,
            process_index=rank,
        )
        for rank in range(world)
    ]
    for epoch in range(2):
        parts = [[batch.tolist() for batch in loader] for loader in loaders]
        dealt = [item for step in zip(*parts, strict=True) for batch in step for item in batch]
        assert dealt[:25] == SampleOrder(25, 5, epoch)[:].tolist()


def test_a_shard_and_a_loader_exchange_positions():
    order = SampleOrder(length=40, seed=7)
    parts = [order.shard(index=rank, count=4, batch_size=3) for rank in range(4)]
    seen = [next(iter(part)) for part in parts]
    state = parts[1].state_dict()
    assert (state["epoch"], state["samples_consumed"], len(parts[0])) == (0, 12, 4)
    resumed = [order.shard(index=rank, count=2, batch_size=7) for rank in range(2)]
    for part in resumed:
        part.load_state_dict(state)
    rest = [index for part in resumed for batch in part for index in batch]
    assert sorted(rest + [index for batch in seen for index in batch]) == list(range(40))
    data = Endless(40)
    sampler = PermutationSampler(data, seed=99)
    loader = prepare_data_loader(DataLoader(data, batch_size=4, sampler=sampler), num_processes=1, process_index=0)
    loader.load_state_dict(state)
    assert [item for batch in loader for item in batch.tolist()] == order[12:].tolist()
    parts[0].load_state_dict(loader.state_dict())
    assert parts[0].order == SampleOrder(40, 7, 1)
    shuffled = prepare_data_loader(DataLoader(data, shuffle=True), num_processes=1, process_index=0)
    with pytest.raises(DataStateError, match="'permutation' order"):
        shuffled.load_state_dict(state)


def test_a_shard_goes_through_epochs():
    part = SampleOrder(length=10, seed=7).shard(index=1, count=2, batch_size=2, drop_last=True)
    epochs = [list(part) for _ in range(2)]
    orders = [SampleOrder(10, 7, epoch)[:].tolist() for epoch in range(2)]
    assert epochs == [[order[2:4], order[6:8]] for order in orders]
    part.set_epoch(0)
    assert list(part) == epochs[0]


def test_a_sampler_on_its_own_goes_through_epochs():
    sampler = PermutationSampler(10, seed=7)
    assert [list(sampler), list(sampler)] == [SampleOrder(10, 7, epoch)[:].tolist() for epoch in (0, 1)]
    torch.manual_seed(4)
    assert PermutationSampler(10).initial_seed == 4


def test_the_first_batch_of_a_trillion_needs_no_memory():
    data = Endless(10**12)
    loader = prepare_data_loader(
        DataLoader(data, batch_size=32, sampler=PermutationSampler(data, seed=5)), num_processes=8, process_index=3
    )
    tracemalloc.start()
    batch = next(iter(loader))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch.tolist() == SampleOrder(10**12, 5)[96:128].tolist()
    assert peak < 1_000_000
    assert len(loader) == 10**12 // 256


def test_positions_of_any_integer_kind():
    order = SampleOrder(7, seed=1)
    whole = order[:].tolist()
    assert order[torch.tensor(5)] == order[5] == whole[5]
    assert order.at(torch.arange(7, dtype=torch.int32)).tolist() == whole
    assert order.at([]).tolist() == []
    for wrong in ([-1], [7], [10**9]):
        with pytest.raises(IndexError, match="of an order of 7 samples"):
            order.at(torch.tensor(wrong))
    with pytest.raises(IndexError, match="of 0 samples"):
        SampleOrder(0, 7).at([0])
    with pytest.raises(TypeError, match="integers"):
        order.at(torch.tensor([1.0]))


def test_numbers_that_walk_together_and_one_by_one_arrive_alike():
    order = SampleOrder(9901, seed=3)  # of 100 x 100 numbers, so that 99 lie outside
    assert sorted(order.at(torch.arange(9901)).tolist()) == list(range(9901))
    assert order.at(torch.arange(9901)).tolist() == [order[position] for position in range(9901)]
