"""The names that loops written for Accelerate call on a loader."""

import pickle

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accel_data import (
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from accel_state import GradientState
from accel_state.errors import DataLoaderError

DATA = torch.arange(12)


def flat(loader):
    return [item for batch in loader for item in batch.tolist()]


def test_an_adapter_is_a_loader_that_knows_where_it_stands():
    loader = DataLoaderAdapter(DATA, batch_size=5)
    iterator = iter(loader)
    next(iterator)
    again = DataLoaderAdapter(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 5, False))
    again.load_state_dict(loader.state_dict())
    again.adjust_state_dict_for_prefetch()
    assert (flat(again), again.end_of_dataloader, len(again)) == ([5, 6, 7, 8, 9, 10, 11], True, 3)


def test_a_loop_of_ones_own_reports_to_accumulation():
    class Own(DataLoaderStateMixin):
        gradient_state = GradientState()

    own, state = Own(), Own.gradient_state
    own.end_of_dataloader, own.remainder = True, 3
    own.begin()
    assert (state.active_dataloader, own.end_of_dataloader, own.remainder) == (own, False, -1)
    own.end()
    assert state.active_dataloader is None
    alone = DataLoaderStateMixin()
    alone.begin()
    alone.end()


@pytest.mark.parametrize("world", [1, 2])
def test_a_sampler_can_be_replaced(world):
    source = DataLoader(DATA, batch_size=2)
    loader = prepare_data_loader(source, num_processes=world, process_index=0)
    assert type(loader.get_sampler()) is SequentialSampler
    loader.set_sampler(range(11, -1, -1))
    assert flat(loader) == [i for start in range(11, 0, -2 * world) for i in (start, start - 1)]
    loader.set_sampler(RandomSampler(DATA))
    assert get_sampler(loader) is loader.get_sampler() is loader.sampler
    epochs = [flat(loader), flat(loader)]
    assert epochs[0] != epochs[1]
    again = prepare_data_loader(source, num_processes=world, process_index=0)
    again.set_sampler(RandomSampler(DATA))
    again.load_state_dict({**loader.state_dict()})
    assert flat(again) == flat(loader)
    assert flat(source) == DATA.tolist()  # the user's own loader is as it was


def test_a_sampler_of_items_can_be_replaced():
    loader = prepare_data_loader(DataLoader(DATA, batch_size=None), num_processes=2, process_index=1)
    loader.set_sampler([3, 2, 1, 0])
    assert [item.item() for item in loader] == [2, 0]


def test_a_stream_has_no_sampler_to_replace():
    class Stream(IterableDataset):
        def __iter__(self):
            yield 1

    loader = prepare_data_loader(DataLoader(Stream()), num_processes=1, process_index=0)
    with pytest.raises(DataLoaderError, match="decides its order itself"):
        loader.set_sampler([0])


def test_a_loader_reads_no_mesh():
    with pytest.raises(DataLoaderError, match="pass it to prepare_data_loader"):
        DataLoaderShard(DATA, torch_device_mesh=object())


def test_a_part_that_is_cut_already_is_used_as_it_is():
    part = DataLoader(DATA[6:], batch_size=2, shuffle=True)
    loader = prepare_data_loader(part, num_processes=2, process_index=1, already_sharded=True)
    assert sorted(flat(loader)) == DATA[6:].tolist()
    assert loader.iteration == 1

    class Half(IterableDataset):
        def __iter__(self):
            yield from range(6, 12)

    stream = prepare_data_loader(
        DataLoader(Half(), batch_size=2), num_processes=2, process_index=1, already_sharded=True
    )
    assert flat(stream) == list(range(6, 12))


@pytest.mark.parametrize("split", [False, True])
def test_a_dispatcher_alone_is_an_ordinary_loader(split):
    loader = DataLoaderDispatcher(DATA, split_batches=split, batch_size=5)
    ends = [loader.end_of_dataloader for _ in loader]
    assert (ends, loader.remainder, loader.total_batch_size, len(loader)) == ([False, False, True], 2, 5, 3)
    assert flat(skip_first_batches(loader, 1)) == DATA[5:].tolist()
    iterator = iter(loader)
    next(iterator)
    again = pickle.loads(pickle.dumps(loader))
    again.load_state_dict(loader.state_dict())
    assert (flat(again), flat(again)) == (DATA[5:].tolist(), DATA.tolist())
    assert (loader.total_dataset_length, again.iteration) == (12, 4)
