"""The loader as a loader: torch's settings, devices, ends, epochs, the mailbox, and what is refused."""

import copy
import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, DistributedSampler, Sampler, Subset

from accel_data import DataLoaderConfiguration, DataLoaderShard, get_sampler, prepare_data_loader
from accel_state import GradientState
from accel_state.errors import DataLoaderError

DATA = torch.arange(17)


def prepared(loader, world=2, rank=0, **how):
    return prepare_data_loader(loader, num_processes=world, process_index=rank, **how)


def flat(loader):
    return [item for batch in loader for item in batch.tolist()]


# ---- the end


def test_the_last_batch_is_known_without_fetching_ahead():
    fetched = []

    class Counting(Dataset):
        def __getitem__(self, index):
            fetched.append(index)
            return index

        def __len__(self):
            return 17

    loader = prepared(DataLoader(Counting(), batch_size=3))
    ends = []
    for step, _ in enumerate(loader):
        ends.append(loader.end_of_dataloader)
        assert len(fetched) == 3 * (step + 1)
    assert ends == [False, False, True]
    assert (loader.remainder, loader.total_batch_size, loader.total_dataset_length, len(loader)) == (5, 6, 17, 3)


@pytest.mark.parametrize(
    ("how", "drop_last", "remainder", "tails"),
    [
        ({}, False, 5, [(3, 3), (3, 2)]),
        ({"even_batches": False}, False, 5, [(3, 3), (2, 2)]),
        ({}, True, -1, [(3, 3), (3, 3)]),
    ],
)
def test_what_of_the_last_batch_is_real(how, drop_last, remainder, tails):
    for rank, tail in enumerate(tails):
        loader = prepared(DataLoader(DATA, batch_size=3, drop_last=drop_last), rank=rank, **how)
        assert loader.tail is None
        list(loader)
        assert (loader.remainder, loader.tail.size, loader.tail.real) == (remainder, *tail)


def test_even_batches_may_change_between_epochs():
    loader = prepared(DataLoader(DATA, batch_size=3), rank=1)
    assert flat(loader)[-3:] == [15, 16, 0]
    loader.batch_sampler.even_batches = False
    assert flat(loader)[-2:] == [15, 16]


# ---- torch's settings


def worker_start(worker_id):
    torch.utils.data.get_worker_info().dataset.worker = worker_id


class Tagged(Dataset):
    worker = -1

    def __getitem__(self, index):
        return index, self.worker

    def __len__(self):
        return 8


def to_sets(items):
    return {tuple(item) for item in items}


@pytest.mark.parametrize("persistent", [False, True])
def test_settings_of_workers_are_kept(persistent):
    source = DataLoader(
        Tagged(),
        batch_size=2,
        num_workers=2,
        collate_fn=to_sets,
        worker_init_fn=worker_start,
        persistent_workers=persistent,
        prefetch_factor=3,
        multiprocessing_context="fork",
        timeout=30,
    )
    loader = prepared(source, world=1)
    first, second = list(loader), list(loader)
    assert first == second == [{(0, 0), (1, 0)}, {(2, 1), (3, 1)}, {(4, 0), (5, 0)}, {(6, 1), (7, 1)}]
    kept = ("num_workers", "collate_fn", "worker_init_fn", "persistent_workers", "prefetch_factor", "timeout")
    assert [getattr(loader, name) for name in kept] == [getattr(source, name) for name in kept]
    assert loader.multiprocessing_context.get_start_method() == "fork"


def test_persistent_workers_survive_an_early_break_and_a_resume():
    loader = prepared(DataLoader(DATA, batch_size=2, num_workers=2, persistent_workers=True), world=1)
    for step, _ in enumerate(loader):
        if step == 2:
            break
    state = loader.state_dict()
    assert flat(loader) == list(range(17))
    loader.load_state_dict(state)
    assert flat(loader) == list(range(6, 17))


def test_pinned_memory_is_kept():
    assert prepared(DataLoader(DATA, pin_memory=True)).pin_memory


def test_no_batch_size_deals_items():
    items = [[int(item) for item in prepared(DataLoader(DATA, batch_size=None), rank=rank)] for rank in (0, 1)]
    assert items == [[*range(0, 17, 2)], [*range(1, 17, 2), 0]]


def test_a_sampler_of_lists():
    class Lists:
        def __iter__(self):
            return iter([[0, 1, 2], [3], [4, 5]])

        def __len__(self):
            return 3

    source = DataLoader(DATA, sampler=Lists(), batch_size=None)
    assert [[b.tolist() for b in prepared(source, rank=r)] for r in (0, 1)] == [[[0, 1, 2], [4, 5]], [[3], [0, 1, 2]]]


def test_a_batch_sampler_given_as_sampler():
    source = DataLoader(torch.arange(20), sampler=BatchSampler(range(20), 3, False), batch_size=None)
    last = [[b.tolist() for b in prepared(source, rank=rank)][-1] for rank in (0, 1)]
    assert last == [[18, 19, 0], [1, 2, 3]]


def test_attributes_say_what_the_user_wrote():
    source = DataLoader(DATA, batch_size=3, drop_last=True)
    loader = prepared(source)
    assert (loader.batch_size, loader.drop_last) == (3, True)
    assert loader.sampler is source.sampler is get_sampler(loader)
    assert loader.dataset is DATA


def test_a_loader_over_a_part_that_is_cut_already():
    loader = DataLoaderShard(DATA, batch_size=5, device="cpu")
    assert flat(loader) == list(range(17))
    assert (loader.device, loader.base_dataloader) == (torch.device("cpu"), loader)


@pytest.mark.parametrize("world", [1, 2])
def test_no_data(world):
    loader = prepared(DataLoader(torch.arange(0), batch_size=3), world=world)
    assert (list(loader), len(loader), loader.end_of_dataloader) == ([], 0, True)


# ---- devices


def test_batches_are_moved():
    nested = [{"a": torch.ones(2), "b": [torch.zeros(1), "text"]}] * 4
    loader = prepared(DataLoader(nested, batch_size=2), world=1, put_on_device=True, device="meta")
    batch = next(iter(loader))
    assert batch["a"].device.type == batch["b"][0].device.type == "meta"
    assert batch["b"][1] == ("text", "text")


def test_batches_stay_unless_asked():
    loader = prepared(DataLoader(DATA, batch_size=2), device="meta")
    assert loader.device is None
    assert next(iter(loader)).device.type == "cpu"


def test_batches_on_the_cpu_are_not_copied():
    batches = [torch.ones(2), (torch.ones(1), torch.ones(1)), {"a": torch.ones(1)}, {"a": [torch.ones(1)]}]
    source = DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)
    loader = prepared(source, world=1, put_on_device=True, device="cpu")
    got = list(loader)
    assert all(mine is given for mine, given in zip(got[:3], batches[:3], strict=True))
    assert got[3]["a"][0] is batches[3]["a"][0]


# ---- the mailbox of gradient accumulation


def test_the_mailbox_holds_the_loader_while_it_is_read():
    state = GradientState()
    loader = prepared(DataLoader(DATA, batch_size=3), gradient_state=state)
    other = prepared(DataLoader(DATA, batch_size=9), gradient_state=state)
    assert loader.gradient_state is state
    for _ in loader:
        assert state.active_dataloader is loader
        for _ in other:
            assert state.active_dataloader is other
        assert state.active_dataloader is loader
    assert state.active_dataloader is None
    for _ in loader:
        break
    assert state.active_dataloader is None
    with pytest.raises(RuntimeError, match="mine"):
        for _ in loader:
            raise RuntimeError("mine")
    assert state.active_dataloader is None


def test_the_mailbox_keeps_no_loader_alive():
    state = GradientState()
    loader = prepared(DataLoader(DATA, batch_size=3), gradient_state=state)
    next(iter(loader))
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    assert state.active_dataloader is None


# ---- epochs


class Telling:
    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class TellingSampler(Telling, Sampler):
    def __iter__(self):
        return iter(range(8))

    def __len__(self):
        return 8


class TellingData(Telling, Dataset):
    def __getitem__(self, index):
        return index

    def __len__(self):
        return 8


def changes(epochs):
    return [epoch for i, epoch in enumerate(epochs) if i == 0 or epoch != epochs[i - 1]]


@pytest.mark.parametrize("wrapped", [False, True])
def test_everyone_is_told_the_epoch(wrapped):
    sampler, data = TellingSampler(), TellingData()
    source = Subset(ConcatDataset([data, data]), range(8)) if wrapped else data
    batches = BatchSampler(sampler, 2, False)
    loader = prepared(DataLoader(source, batch_sampler=batches) if wrapped else DataLoader(source, 2, sampler=sampler))
    for _ in range(3):
        list(loader)
    loader.set_epoch(7)
    list(loader)
    assert changes(sampler.epochs) == changes(data.epochs) == [0, 1, 2, 7]
    assert loader.iteration == 8


def test_a_distributed_sampler_is_not_cut_again():
    parts = []
    for rank in (0, 1):
        sampler = DistributedSampler(range(16), num_replicas=2, rank=rank, seed=3)
        loader = prepared(DataLoader(torch.arange(16), batch_size=2, sampler=sampler), rank=rank)
        epochs = [flat(loader) for _ in range(2)]
        assert (epochs[0] != epochs[1], loader.total_batch_size, len(loader)) == (True, 4, 4)
        parts += epochs[0]
    assert sorted(parts) == list(range(16))


def test_persistent_workers_that_cannot_be_told_the_epoch_are_warned_of():
    class Told(Tagged):
        def set_epoch(self, epoch):
            self.epoch = epoch

    loader = prepared(DataLoader(Told(), num_workers=1, persistent_workers=True, multiprocessing_context="fork"))
    list(loader)
    with pytest.warns(UserWarning, match=r"Told.set_epoch does not reach persistent workers") as warned:
        list(loader)
    assert warned[0].filename == __file__


# ---- what is refused


class OwnIter(DataLoader):
    def __iter__(self):
        return iter([])


def test_what_cannot_be_honoured_is_refused_with_a_way_out():
    source = DataLoader(DATA, batch_size=2)
    with pytest.raises(DataLoaderError, match=r"it has 1 ranks, and parts are given for 2.*dispatch_batches=False"):
        prepared(source, dispatch_batches=True)


def test_the_process_says_which_rank_it_is():
    assert len(prepare_data_loader(DataLoader(DATA, batch_size=2))) == 9


def test_the_configuration_has_accelerates_fields():
    assert vars(DataLoaderConfiguration()) == {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": False,
        "data_seed": None,
        "non_blocking": False,
        "use_stateful_dataloader": False,
    }


def test_copies_have_workers_of_their_own():
    loader = prepared(DataLoader(DATA, batch_size=2, num_workers=1, persistent_workers=True), world=1)
    next(iter(loader))
    assert flat(copy.copy(loader)) == flat(loader)


def test_importing_the_package_costs_no_torch():
    code = "import sys, accel_data; assert 'torch' not in sys.modules; assert 'prepare_data_loader' in dir(accel_data)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_transform_sees_every_batch_and_resumes_with_the_loader():
    loader = prepared(DataLoader(DATA, batch_size=4), world=1)
    loader.transform = lambda batch: -batch
    assert flat(loader) == [-item for item in range(17)]
    assert flat(loader.skipping(3)) == [-item for item in range(12, 17)]
