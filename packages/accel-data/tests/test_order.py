"""Shuffled orders: Accelerate's, torch's, and never at the cost of the global generator."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_data import (
    BatchSamplerShard,
    DataLoaderShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    get_sampler,
    orders,
    prepare_data_loader,
)
from accel_data.orders import draw_order, finish_order

DATA = torch.arange(20)


def prepared(loader, world=2, rank=0, **how):
    return prepare_data_loader(loader, num_processes=world, process_index=rank, **how)


def batches(loader):
    return [batch.tolist() for batch in loader]


def flat(loader):
    return [item for batch in loader for item in batch.tolist()]


def shuffled(seed=7, **how):
    torch.manual_seed(seed)
    return prepared(DataLoader(DATA, batch_size=3, shuffle=True), **how)


# Recorded from Accelerate 1.15: seed 7, 20 samples, batches of 3, rank 0 of 2, three epochs.
ACCELERATE_EPOCHS = [
    [[13, 1, 9], [19, 10, 15], [5, 2, 18], [14, 6, 13]],
    [[19, 13, 0], [1, 4, 8], [17, 3, 2], [9, 5, 19]],
    [[14, 18, 11], [13, 19, 10], [9, 16, 1], [0, 8, 14]],
]
# The same with use_seedable_sampler=True and batches of 5: seed 7, then data_seed=42.
SEEDABLE_EPOCHS = {
    None: [
        [[15, 17, 9, 12, 7], [18, 8, 2, 14, 16]],
        [[3, 17, 11, 18, 9], [0, 4, 1, 19, 2]],
        [[10, 15, 2, 14, 0], [18, 12, 1, 17, 8]],
    ],
    42: [
        [[2, 14, 18, 15, 1], [8, 3, 7, 17, 13]],
        [[8, 16, 13, 19, 9], [11, 12, 18, 6, 15]],
        [[12, 10, 9, 0, 15], [3, 13, 19, 1, 16]],
    ],
}


def test_the_order_is_accelerates():
    loader = shuffled()
    assert [batches(loader) for _ in range(3)] == ACCELERATE_EPOCHS


@pytest.mark.parametrize("data_seed", [None, 42])
def test_the_seedable_order_is_accelerates(data_seed):
    torch.manual_seed(7)
    source = DataLoader(DATA, batch_size=5, shuffle=True)
    loader = prepared(source, use_seedable_sampler=True, data_seed=data_seed)
    assert isinstance(get_sampler(loader), SeedableRandomSampler)
    assert [batches(loader) for _ in range(3)] == SEEDABLE_EPOCHS[data_seed]


def test_a_seedable_order_is_a_function_of_seed_and_epoch():
    torch.manual_seed(7)
    loader = prepared(DataLoader(DATA, batch_size=5, shuffle=True), use_seedable_sampler=True)
    loader.set_epoch(2)
    assert batches(loader) == SEEDABLE_EPOCHS[None][2]
    loader.set_epoch(0)
    assert batches(loader) == SEEDABLE_EPOCHS[None][0]


def test_a_seedable_sampler_alone():
    torch.manual_seed(7)
    sampler = SeedableRandomSampler(DATA)
    first, second = list(sampler), list(sampler)
    assert (first[:5], second[:5], sampler.epoch) == ([15, 17, 9, 12, 7], [3, 17, 11, 18, 9], 2)
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(SeedableRandomSampler(DATA, data_seed=42))[:5] == [2, 14, 18, 15, 1]


def test_one_process_shuffles_by_the_same_order():
    torch.manual_seed(7)
    alone = flat(prepared(DataLoader(DATA, batch_size=3, shuffle=True), world=1))
    both = [batches(shuffled(rank=rank)) for rank in (0, 1)]
    dealt = [item for pair in zip(*both, strict=True) for batch in pair for item in batch]
    assert dealt[:20] == alone


SAMPLERS = {
    "permutation": lambda g: RandomSampler(DATA, generator=g),
    "fewer": lambda g: RandomSampler(DATA, num_samples=13, generator=g),
    "more": lambda g: RandomSampler(DATA, num_samples=47, generator=g),
    "twice": lambda g: RandomSampler(DATA, num_samples=40, generator=g),
    "replacement": lambda g: RandomSampler(DATA, replacement=True, num_samples=71, generator=g),
    "weighted": lambda g: WeightedRandomSampler(torch.arange(1.0, 21.0), 30, generator=g),
    "subset": lambda g: SubsetRandomSampler([3, 1, 4, 15, 9], generator=g),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_known_orders_are_torchs_over_epochs(kind):
    ours, theirs = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    sampler, reference = SAMPLERS[kind](ours), SAMPLERS[kind](theirs)
    for _ in range(3):
        assert draw_order(sampler).tolist() == list(reference)
        finish_order(sampler)
        assert torch.equal(ours.get_state(), theirs.get_state())


def test_orders_that_only_iterating_tells():
    assert draw_order([3, 1]) is None
    assert draw_order(SubsetRandomSampler(["a", "b"])) is None


@pytest.mark.parametrize("kind", SAMPLERS)
def test_samplers_of_torch_get_a_generator_and_stay_whole(kind):
    source = DataLoader(DATA, batch_size=3, sampler=SAMPLERS[kind](None))
    torch.manual_seed(3)
    loaders = []
    for rank in (0, 1):
        torch.manual_seed(3)
        loaders.append(prepared(source, rank=rank, even_batches=False))
    assert source.sampler.generator is None
    parts = [batches(loader) for loader in loaders]
    reference = SAMPLERS[kind](torch.Generator().manual_seed(loaders[0].synchronized_generator.initial_seed()))
    dealt = [part[step] for step in range(len(parts[0])) for part in parts if step < len(part)]
    assert [item for batch in dealt for item in batch] == list(reference)


def test_a_sampler_with_a_generator_keeps_it():
    generator = torch.Generator().manual_seed(3)
    source = DataLoader(DATA, batch_size=4, shuffle=True, generator=generator)
    before = torch.get_rng_state()
    loader = prepared(source)
    assert loader.synchronized_generator is generator
    assert torch.equal(before, torch.get_rng_state())
    assert flat(prepared(source, world=1)) == torch.randperm(20, generator=torch.Generator().manual_seed(3)).tolist()


class Drawing(Sampler):
    """A sampler of somebody else's, with a generator attribute."""

    def __init__(self):
        self.generator = None

    def __iter__(self):
        yield from torch.randperm(20, generator=self.generator).tolist()

    def __len__(self):
        return 20


@pytest.mark.parametrize(
    "wrap", [lambda s: BatchSampler(s, 2, False), lambda s: SkipBatchSampler(BatchSampler(s, 2, False))]
)
def test_a_foreign_sampler_with_room_for_a_generator_gets_one(wrap):
    parts = []
    for rank in (0, 1):
        torch.manual_seed(4)
        loader = prepared(DataLoader(DATA, batch_sampler=wrap(Drawing())), rank=rank)
        torch.rand(rank)  # the ranks' global generators drift apart
        parts.append(flat(loader))
    assert sorted(parts[0] + parts[1]) == list(range(20))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_iterating_leaves_the_global_generator_alone(workers, shuffle):
    torch.manual_seed(1)
    loader = prepared(DataLoader(DATA, batch_size=3, shuffle=shuffle, num_workers=workers))
    before = torch.get_rng_state()
    assert len(flat(loader)) == 12
    next(iter(loader))
    assert torch.equal(before, torch.get_rng_state())


def test_making_an_iterator_shifts_no_order():
    loader = shuffled()
    iter(loader)
    iter(loader)
    assert batches(loader) == ACCELERATE_EPOCHS[0]


class Noise(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return torch.rand(())

    def __len__(self):
        return 4


def noise(rank=0, epochs=1, seed=2):
    torch.manual_seed(seed)
    loader = prepared(DataLoader(Noise(), batch_size=2, num_workers=1), rank=rank)
    return [float(batch[0]) for _ in range(epochs) for batch in loader]


def test_workers_are_seeded_by_run_epoch_and_rank():
    first, second = noise(epochs=2)
    assert noise(epochs=2) == [first, second]
    assert len({first, second, *noise(rank=1), *noise(seed=3)}) == 4


def test_the_source_loader_is_untouched():
    source = DataLoader(DATA, batch_size=3)
    loader = prepared(source)
    list(loader)
    assert loader.base_dataloader is source
    assert type(source) is DataLoader
    assert not isinstance(source.batch_sampler, BatchSamplerShard)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, DataLoaderShard)


@pytest.mark.parametrize("length", [1, 2, 5, 624, 1000, 2**20 + 1, 2**20 + 2])
@pytest.mark.parametrize("recognised", [True, False])
def test_the_draw_after_the_last_sample_leaves_the_generator_as_torch_does(monkeypatch, length, recognised):
    monkeypatch.setattr(orders, "_permutations_draw_32_bits", lambda: recognised)
    ours, theirs = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    finish_order(RandomSampler(range(length), generator=ours))
    torch.randperm(length, generator=theirs)
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_this_torch_is_recognised():
    assert orders._permutations_draw_32_bits()
