"""Ranks that run out of data at different times: a clear end on all of them, or a block that allows it."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from accel_data import prepare_data_loader, uneven_inputs
from accel_state import PartialState
from accel_state.errors import DataLoaderError


class Foreign(Sampler):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))

    def __len__(self):
        return self.length


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class Pairs:
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter([list(range(i, min(i + 2, self.length))) for i in range(0, self.length, 2)])


KINDS = ["sequential", "shuffled", "foreign", "batches", "stream"]


def source(kind, length, workers=0):
    data = torch.arange(length)
    if kind == "stream":
        return DataLoader(Stream(length), batch_size=2, num_workers=workers)
    if kind == "batches":
        return DataLoader(data, batch_sampler=Pairs(length), num_workers=workers)
    sampler = Foreign(length) if kind == "foreign" else None
    return DataLoader(data, batch_size=2, shuffle=kind == "shuffled", sampler=sampler, num_workers=workers)


def prepared(kind, length, world, rank, workers=0, **how):
    return prepare_data_loader(
        source(kind, length, workers), num_processes=world, process_index=rank, even_batches=False, **how
    )


def steps_until_the_end(loader):
    """Batches that are read in a loop whose every step waits for all ranks, and how it ends."""
    served = 0
    try:
        for _ in loader:
            served += 1
            loader.ranks_met = True
    except DataLoaderError as error:
        return served, str(error)
    return served, None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("length", "common", "first_dry"), [(11, 1, None), (12, 2, None), (9, 1, 2), (7, 1, 1), (14, 2, 1)]
)
def test_all_ranks_fail_alike_before_any_would_wait_for_another(kind, length, common, first_dry):
    ends = [steps_until_the_end(prepared(kind, length, 3, rank)) for rank in range(3)]
    if first_dry is None:
        assert ends == [(-(-length // 6), None)] * 3
    else:
        assert ends == [ends[0]] * 3
        assert ends[0][0] == common
        assert f"After {common} batches the ranks from {first_dry} on have none left" in ends[0][1]
    with_workers = steps_until_the_end(prepared(kind, length, 3, 0, workers=1)) if kind != "stream" else ends[0]
    assert with_workers == ends[0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_may_end_unevenly(kind):
    assert [sum(1 for _ in prepared(kind, 7, 3, rank)) for rank in range(3)] == [2, 1, 1]
    loader = prepared(kind, 7, 3, 0)
    assert steps_until_the_end(loader)[0] == 1
    assert len(list(loader)) == 2  # what happened in one pass says nothing about the next


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trains", [True, False])
def test_ranks_without_any_data_fail_like_the_others_where_training_was_announced(kind, trains):
    loaders = [prepared(kind, 3, 3, rank) for rank in range(3)]
    for loader in loaders:
        loader.ranks_will_meet = lambda: trains
    if trains:
        ends = [steps_until_the_end(loader) for loader in loaders]
        assert ends == [ends[0]] * 3
        assert ends[0][0] == 0
        assert "After 0 batches the ranks from 2 on have none left" in ends[0][1]
        with uneven_inputs(loaders):
            assert [steps_until_the_end(loader) for loader in loaders] == [(1, None), (1, None), (0, None)]
    else:
        assert [len(list(loader)) for loader in loaders] == [1, 1, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_lets_ranks_end_apart(kind):
    loaders = [prepared(kind, 7, 3, rank) for rank in range(3)]
    with uneven_inputs(loaders):
        assert [steps_until_the_end(loader) for loader in loaders] == [(2, None), (1, None), (1, None)]
    assert steps_until_the_end(loaders[1])[1] is not None


def test_a_block_changes_even_batches_and_restores_it():
    loader = prepare_data_loader(DataLoader(torch.arange(7), batch_size=2), num_processes=3, process_index=2)
    with pytest.raises(KeyError), uneven_inputs([loader, "no loader"], even_batches=False):
        assert len(list(loader)) == len(loader) == 1
        raise KeyError
    assert len(list(loader)) == len(loader) == 2
    stream = prepare_data_loader(DataLoader(Stream(7), batch_size=2), num_processes=3, process_index=2)
    with (
        pytest.warns(UserWarning, match="1 of 2 loaders stay") as warned,
        uneven_inputs([loader, stream], even_batches=False),
    ):
        assert (len(list(loader)), len(list(stream))) == (1, 2)
    assert warned[0].filename == __file__


def dispatched():
    PartialState(cpu=True)
    loader = prepare_data_loader(source("stream", 9), dispatch_batches=True, even_batches=False)
    first = steps_until_the_end(loader)
    with uneven_inputs([loader]):
        second = steps_until_the_end(loader)
    return first, second


def test_dispatched_batches_end_alike_too(ranks):
    (failed, joined), (failed_too, joined_too) = ranks(dispatched, 2)
    assert failed == failed_too
    assert failed[0] == 2
    assert "the ranks from 1 on have none left" in failed[1]
    assert (joined, joined_too) == ((3, None), (2, None))
