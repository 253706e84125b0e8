"""What a run saw: fingerprints, transforms that depend on the sample alone, and samples named when a read fails."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from accel_data import DevicePrefetcher, PermutationSampler, SampleDigest, prepare_data_loader, skip_first_batches
from accel_state.errors import DataLoaderError


def rank_of(world, rank, *, length=23, batch_size=2, order="shuffle", seed=3, workers=0, data=None, **how):
    torch.manual_seed(seed)
    source = DataLoader(
        torch.arange(length) if data is None else data,
        batch_size=batch_size,
        num_workers=workers,
        shuffle=order == "shuffle",
        sampler=PermutationSampler(length, seed=seed) if order == "permutation" else None,
        persistent_workers=how.pop("persistent_workers", False),
    )
    return prepare_data_loader(source, num_processes=world, process_index=rank, **how)


# ---- fingerprints


@pytest.mark.parametrize("order", ["sequential", "shuffle", "permutation"])
def test_parts_of_a_run_add_up_to_the_whole(order):
    whole = rank_of(1, 0, order=order)
    list(whole)
    list(whole)
    first = [rank_of(3, rank, order=order) for rank in range(3)]
    for loader in first:
        for _, _ in zip(range(2), loader, strict=False):
            pass
    second = [rank_of(2, rank, order=order, seed=3, workers=1) for rank in range(2)]
    for loader in second:
        loader.load_state_dict(first[0].state_dict())
        list(loader)
        list(loader)
    parts = [loader.fingerprint() for loader in first + second]
    assert sum(parts, SampleDigest()) == whole.fingerprint()
    assert whole.fingerprint().num_samples == 46
    assert str(whole.fingerprint()).startswith("46:")


def test_another_order_place_or_epoch_is_another_fingerprint():
    def seen(steps, **how):
        loader = rank_of(1, 0, **how)
        for _, _ in zip(range(steps), loader, strict=False):
            pass
        return loader.fingerprint()

    assert seen(3) == seen(3)
    digests = {seen(3), seen(3, seed=4), seen(2), seen(3, order="sequential"), seen(3, batch_size=3)}
    assert len(digests) == 5
    loader = rank_of(1, 0, order="sequential")
    list(loader)
    first = loader.fingerprint()
    list(loader)
    assert loader.fingerprint() != first + first


def test_passes_that_were_left_and_skips_count_what_was_received():
    loader = rank_of(1, 0, order="sequential", length=8)
    left = iter(loader)
    next(left)
    assert loader.fingerprint().num_samples == 2
    for _ in loader:
        break
    left.close()
    assert loader.fingerprint().num_samples == 4
    list(skip_first_batches(loader, 3))
    assert loader.fingerprint().num_samples == 6


class Foreign(Sampler):
    def __iter__(self):
        return iter(range(4))

    def __len__(self):
        return 4


def test_an_order_that_is_only_read_has_no_fingerprint():
    loader = prepare_data_loader(DataLoader(torch.arange(4), sampler=Foreign()), num_processes=1, process_index=0)
    next(iter(loader))
    with pytest.raises(DataLoaderError, match="known without reading it"):
        loader.fingerprint()


# ---- transforms


try:
    from numpy import random as numpy_random
except ImportError:  # torch works without, and so do we
    numpy_random = None


def numpy_draw():
    return 0.0 if numpy_random is None else numpy_random.rand()


def numpy_state():
    return None if numpy_random is None else numpy_random.get_state()[1].tolist()


class Noisy(Dataset):
    def __getitem__(self, index):
        return torch.tensor([index, random.random(), numpy_draw(), torch.rand(()).item()], dtype=torch.float64)

    def __len__(self):
        return 23


def noise(loader):
    return {int(row[0]): row[1:].tolist() for batch in loader for row in batch}


@pytest.mark.parametrize("order", ["sequential", "shuffle", "permutation"])
def test_noise_depends_on_epoch_and_sample_alone(order):
    def noisy(world=1, rank=0, **how):
        return rank_of(world, rank, order=order, data=Noisy(), seed_per_sample=True, **how)

    whole = noisy()
    epochs = [noise(whole), noise(whole)]
    assert epochs[0][5] != epochs[1][5]
    with_workers = noisy(workers=2, persistent_workers=True)
    assert [noise(with_workers), noise(with_workers)] == epochs
    assert noise(noisy(2, 0)) | noise(noisy(2, 1)) == epochs[0]
    loader = noisy()
    next(iter(loader))
    resumed = noisy(workers=1)
    resumed.load_state_dict(loader.state_dict())
    assert noise(resumed).items() <= epochs[0].items()


def test_seeding_samples_moves_no_generator_of_the_main_process():
    loader = rank_of(1, 0, data=Noisy(), seed_per_sample=True)
    before = random.getstate(), torch.get_rng_state(), numpy_state()
    list(loader)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert numpy_state() == before[2]
    assert type(loader.dataset) is Noisy


def test_samples_of_lists_and_single_items_are_seeded_too():
    items = prepare_data_loader(
        DataLoader(Noisy(), batch_size=None), num_processes=1, process_index=0, seed_per_sample=True
    )
    assert [row.tolist() for row in items] == [row.tolist() for row in items] or items.iteration == 2

    class Lists(Dataset):
        def __getitem__(self, indices):
            return torch.rand(len(indices))

    lists = DataLoader(Lists(), sampler=[[0, 1], [2]], batch_size=None)
    loader = prepare_data_loader(lists, num_processes=1, process_index=0, seed_per_sample=True)
    first = [batch.tolist() for batch in loader]
    loader.set_epoch(0)
    assert [batch.tolist() for batch in loader] == first
    assert [len(batch) for batch in first] == [2, 1]


def test_a_stream_has_no_samples_to_seed():
    class Stream(IterableDataset):
        def __iter__(self):
            yield 1

    with pytest.raises(DataLoaderError, match="map-style"):
        prepare_data_loader(DataLoader(Stream()), num_processes=1, process_index=0, seed_per_sample=True)


# ---- failing reads


class Holed(Dataset):
    def __getitem__(self, index):
        if index == 11:
            raise OSError("no such block")
        return index

    def __len__(self):
        return 23


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_read_names_its_samples(workers):
    loader = rank_of(2, 1, order="sequential", data=Holed(), workers=workers)
    with pytest.raises(OSError, match="no such block") as caught:
        list(loader)
    assert caught.value.__notes__ == ["accel-data: this happened while reading batch 2 of the pass, samples [10, 11]"]
    foreign = prepare_data_loader(
        DataLoader(Holed(), sampler=range(11, 23), num_workers=workers), num_processes=1, process_index=0
    )
    with pytest.raises(OSError, match="no such block") as caught:
        list(foreign)
    assert caught.value.__notes__ == ["accel-data: this happened while reading batch 0 of the pass"]


def test_a_worker_that_dies_is_an_error():
    import os

    class Deadly(Dataset):
        def __getitem__(self, index):
            os._exit(7)

        def __len__(self):
            return 4

    loader = prepare_data_loader(DataLoader(Deadly(), num_workers=1), num_processes=1, process_index=0)
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        list(loader)
    assert "samples [0]" in caught.value.__notes__[0]


# ---- placement alone


def test_any_iterable_can_be_placed():
    batches = [torch.zeros(2), {"a": torch.ones(1)}]
    placed = DevicePrefetcher(batches, "cpu")
    assert len(placed) == 2
    assert [a is b for a, b in zip(placed, batches, strict=True)] == [True, True]
    assert [type(batch) for batch in placed] == [torch.Tensor, dict]
    on_meta = list(DevicePrefetcher(batches[:1], "cpu"))
    assert on_meta[0].device.type == "cpu"


def test_on_the_cpu_nothing_is_read_ahead():
    read = []

    def batches():
        for number in range(3):
            read.append(number)
            yield torch.tensor(number)

    class Source:
        def __iter__(self):
            return batches()

    iterator = iter(DevicePrefetcher(Source(), "cpu"))
    next(iterator)
    assert read == [0]
