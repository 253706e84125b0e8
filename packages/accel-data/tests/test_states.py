"""States at the edges: data sets that tell where they stand, epochs of unequal lengths, seeds, malformed states."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from accel_data import PermutationSampler, prepare_data_loader, skip_first_batches
from accel_state import PartialState
from accel_state.errors import DataStateError


def prepared(data, world=1, rank=0, how=None, **loader_how):
    return prepare_data_loader(
        DataLoader(data, **loader_how), num_processes=world, process_index=rank, **(how or {"dispatch_batches": False})
    )


def batches(loader):
    return [batch.tolist() for batch in loader]


def flat(lists):
    return [item for each in lists for item in each]


def take(loader, count):
    return [batch.tolist() for _, batch in zip(range(count), loader, strict=False)]


# ---- streams that workers split


class Strided(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        return iter(range(worker.id, 24, worker.num_workers))


def strided(workers, how=None):
    return prepared(Strided(), batch_size=2, num_workers=workers, how=how)


def test_a_position_of_worker_streams_only_fits_as_many_workers():
    loader = strided(2)
    seen = take(loader, 3)
    with pytest.raises(DataStateError, match=r"num_workers=2.*has 1: each worker reads"):
        strided(1).load_state_dict(loader.state_dict())
    same = strided(2)
    same.load_state_dict(loader.state_dict())
    assert sorted(flat(seen + batches(same))) == list(range(24))


def test_an_epoch_start_fits_any_number_of_workers():
    loader = strided(1)
    loader.load_state_dict(strided(2).state_dict())
    assert sorted(flat(batches(loader))) == list(range(24))


def dispatched_over_workers():
    PartialState(cpu=True)
    how = {"dispatch_batches": True}
    state_of_two = prepare_data_loader(DataLoader(Strided(), batch_size=2, num_workers=2), **how)
    take(state_of_two, 2)
    of_one = prepare_data_loader(DataLoader(Strided(), batch_size=2, num_workers=1), **how)
    with pytest.raises(DataStateError, match="num_workers=2"):
        of_one.load_state_dict(state_of_two.state_dict())
    return True


def test_dispatched_worker_streams_too(ranks):
    assert ranks(dispatched_over_workers, 2) == [True, True]


# ---- data sets that keep their place


class Keeping(IterableDataset):
    """Keeps its place in itself, and goes back to its start at its end."""

    def __init__(self, length):
        self.length, self.place = length, 0

    def __iter__(self):
        while self.place < self.length:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Continuing(Keeping):
    """Keeps its place, stays at its end, and begins anew unless it was just put somewhere."""

    is_placed = False

    def load_state_dict(self, state):
        self.place, self.is_placed = state["place"], True

    def __iter__(self):
        self.place = self.place if self.is_placed else 0
        self.is_placed = False
        while self.place < self.length:
            self.place += 1
            yield self.place - 1


def keeping_edges(kind, how):
    """Every edge on one rank; `how` decides who reads."""
    PartialState(cpu=True)

    def loader(length):
        return prepared(kind(length), how=how, batch_size=4)

    found = {}
    for length in (11, 12):
        first, resumed = loader(length), loader(length)
        for _ in first:
            state = first.state_dict()
        resumed.load_state_dict(state)
        found[f"last of {length}"] = [len(batches(resumed)), len(batches(resumed))]
    left = loader(12)
    at_start = left.state_dict()
    take(left, 1)
    left.load_state_dict(at_start)
    found["start loaded after break"] = batches(left)
    left = loader(12)
    list(left)
    take(left, 2)
    found["skipped after break"] = batches(skip_first_batches(left, 1))
    take(left, 2)
    found["anew after break"] = [len(batches(left)), len(batches(left))]
    return found


@pytest.mark.parametrize("kind", [Keeping, Continuing])
@pytest.mark.parametrize("how", [{"dispatch_batches": False}, {"dispatch_batches": True}])
def test_edges_of_data_sets_that_keep_their_place(ranks, kind, how):
    (found,) = ranks(keeping_edges, 1, kind, how)
    epoch = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert found == {
        "last of 11": [0, 3],
        "last of 12": [0, 3],
        "start loaded after break": epoch,
        "skipped after break": epoch[1:],
        "anew after break": [3, 3],
    }


# ---- epochs of unequal lengths


class Growing:
    """A batch sampler whose batches get longer, so that there are fewer, with each epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        size = 2 + self.epoch
        return iter([list(range(i, min(i + size, 24))) for i in range(0, 24, size)])

    def __len__(self):
        return sum(1 for _ in self)


def growing():
    return prepared(torch.arange(24), batch_sampler=Growing())


@pytest.mark.parametrize("stop", [1, 8, 0])
def test_epochs_may_have_unequal_numbers_of_batches(stop):
    loader, resumed = growing(), growing()
    list(loader)
    iterator = iter(loader)
    seen = [next(iterator).tolist() for _ in range(stop)]
    resumed.load_state_dict(loader.state_dict())
    assert flat(seen + batches(resumed)) == list(range(24))
    assert len(batches(resumed)) == 6
    after_two = growing()
    after_two.load_state_dict(resumed.state_dict())
    assert len(batches(after_two)) == 5


def test_skipping_counts_batches_of_the_epoch_that_comes():
    class Shrinking(Growing):
        def set_epoch(self, epoch):
            self.epoch = 5 - epoch

    loader = prepared(torch.arange(24), batch_sampler=Shrinking())
    loader.set_epoch(0)
    list(loader)  # 4 batches of 7
    loader.set_epoch(3)
    assert batches(skip_first_batches(loader, 5)) == [[20, 21, 22, 23]]


def test_a_refused_state_leaves_the_epoch():
    loader = growing()
    state = growing().state_dict() | {"epoch": 2, "length": 99, "batches_consumed": 1}
    with pytest.raises(DataStateError, match="99 batches"):
        loader.load_state_dict(state)
    assert len(batches(loader)) == 12


# ---- seeds of samples


class Noise(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(())


def noisy(seed):
    torch.manual_seed(seed)
    return prepared(Noise(), batch_size=2, how={"seed_per_sample": True})


def test_seeds_of_samples_are_part_of_the_state():
    reference, first = noisy(1), noisy(1)
    epochs = [batches(reference), batches(reference)]
    assert take(first, 2) == epochs[0][:2]
    resumed = noisy(2)
    resumed.load_state_dict(first.state_dict())
    assert [batches(resumed), batches(resumed)] == [epochs[0][2:], epochs[1]]
    assert batches(noisy(2)) != epochs[0]


def noise_of_ranks(state):
    process = PartialState(cpu=True)
    torch.manual_seed(process.process_index)
    loader = prepare_data_loader(DataLoader(Noise(), batch_size=1), seed_per_sample=True)
    if state is not None:
        loader.load_state_dict(state)
    seen = take(loader, 2 if state is None else 4)
    return seen, loader.state_dict()


def test_ranks_seed_samples_alike(ranks):
    before = ranks(noise_of_ranks, 2, None)
    assert before[0][1] == before[1][1]
    after = ranks(noise_of_ranks, 2, before[1][1])
    torch.manual_seed(0)
    alone = prepared(Noise(), batch_size=1, how={"seed_per_sample": True})
    dealt = [of_rank[0][step] for part in (before, after) for step in range(2) for of_rank in part]
    assert dealt == batches(alone)


# ---- malformed states


def shuffled():
    return prepared(torch.arange(8), batch_size=2, shuffle=True)


def permuted():
    return prepared(torch.arange(8), batch_size=2, sampler=PermutationSampler(8, seed=1))


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (shuffled, {"epoch": None}, "no 'epoch'"),
        (shuffled, {"epoch": "x"}, "'x' as 'epoch', which has to be a whole number"),
        (shuffled, {"samples_consumed": 1.5}, "1.5 as 'samples_consumed'"),
        (shuffled, {"generator_state": None}, "no 'generator_state'"),
        (shuffled, {"generator_state": torch.zeros(3, dtype=torch.uint8)}, "'generator_state', which has to be"),
        (shuffled, {"generator_state": "x"}, "'generator_state', which has to be"),
        (permuted, {"seed": None}, "no 'seed'"),
        (permuted, {"seed": "x"}, "'x' as 'seed'"),
        (permuted, {"shard_positions": ["x"]}, "'shard_positions'"),
    ],
)
def test_malformed_states_are_refused(make, change, message):
    state = {key: value for key, value in (make().state_dict() | change).items() if value is not None}
    loader = make()
    with pytest.raises(DataStateError, match=message):
        loader.load_state_dict(state)
    assert sorted(flat(batches(loader))) == list(range(8))


@pytest.mark.parametrize("state", [None, [], 3, {}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(DataStateError, match="state"):
        shuffled().load_state_dict(state)
