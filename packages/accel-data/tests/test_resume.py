"""A saved position continues exactly: any moment, any number of ranks and workers."""

import copy
import json
import logging
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Sampler

from accel_data import prepare_data_loader, skip_first_batches
from accel_state.errors import DataLoaderError, DataStateError


class Shuffling(Sampler):
    """A foreign sampler with a generator."""

    def __init__(self, length):
        self.length, self.generator = length, None

    def __iter__(self):
        yield from torch.randperm(self.length, generator=self.generator).tolist()

    def __len__(self):
        return self.length


class Pairs:
    """A foreign batch sampler: all pairs of neighbours, in turn."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter([list(range(i, min(i + 2, self.length))) for i in range(0, self.length, 2)])

    def __len__(self):
        return (self.length + 1) // 2


def source(kind, length, batch_size, workers=0):
    data = torch.arange(length)
    if kind == "foreign sampler":
        return DataLoader(data, batch_size=batch_size, sampler=Shuffling(length), num_workers=workers)
    if kind == "foreign batches":
        return DataLoader(data, batch_sampler=Pairs(length), num_workers=workers)
    return DataLoader(data, batch_size=batch_size, shuffle=kind != "sequential", num_workers=workers)


KINDS = ["sequential", "shuffle", "seedable", "foreign sampler", "foreign batches"]


def loaders(kind, world=1, *, length=24, batch_size=2, workers=0, seed=11, **how):
    """The loaders of all ranks, in one process."""
    made = []
    for rank in range(world):
        torch.manual_seed(seed)
        made.append(
            prepare_data_loader(
                source(kind, length, batch_size, workers),
                num_processes=world,
                process_index=rank,
                use_seedable_sampler=kind == "seedable",
                **how,
            )
        )
    return made


def flat(loader):
    return [item for batch in loader for item in batch.tolist()]


def dealt(group):
    """What all ranks get, round by round."""
    parts = [[batch.tolist() for batch in loader] for loader in group]
    rounds = max(len(part) for part in parts)
    return [item for step in range(rounds) for part in parts if step < len(part) for item in part[step]]


def stored(state):
    """A state after a trip through JSON, with its tensor kept apart, as a checkpoint does."""
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    assert all(value.dtype is torch.uint8 for value in tensors.values())
    plain = {key: value for key, value in state.items() if key not in tensors}
    assert all(isinstance(value, int | str) for value in plain.values())
    return json.loads(json.dumps(plain)) | copy.deepcopy(tensors)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_cycles_of_saving_and_loading_lose_and_repeat_nothing(kind, workers):
    (reference,) = loaders(kind)
    epochs = [flat(reference) for _ in range(3)]

    (loader,) = loaders(kind, workers=workers)
    assert flat(loader) == epochs[0]
    iterator = iter(loader)
    seen = [next(iterator).tolist() for _ in range(3)]
    for fetched in (0, 2, 1):  # also right after loading, with no batch read
        (loader,), state = loaders(kind, workers=workers, seed=99), stored(loader.state_dict())
        loader.load_state_dict(state)
        assert stored(loader.state_dict()).keys() == state.keys()
        iterator = iter(loader)
        seen += [next(iterator).tolist() for _ in range(fetched)]
    seen += [batch.tolist() for batch in iterator]
    assert [item for batch in seen for item in batch] == epochs[1]
    assert flat(loader) == epochs[2]


@pytest.mark.parametrize("kind", KINDS)
def test_before_the_first_batch_and_after_the_last_epoch(kind):
    (reference,) = loaders(kind)
    epochs = [flat(reference) for _ in range(3)]
    (fresh,), (early,) = loaders(kind), loaders(kind, seed=99)
    early.load_state_dict(stored(fresh.state_dict()))
    assert [flat(early), flat(early)] == epochs[:2]
    (late,) = loaders(kind, seed=99)
    late.load_state_dict(stored(early.state_dict()))
    assert flat(late) == epochs[2]


def test_inside_the_last_batch_nothing_is_left_of_the_epoch():
    (reference,), (loader,), (resumed,) = (loaders("shuffle") for _ in range(3))
    epochs = [flat(reference) for _ in range(2)]
    for _ in loader:
        state = loader.state_dict()
    resumed.load_state_dict(stored(state))
    assert (resumed.iteration, flat(resumed)) == (0, [])
    assert (resumed.iteration, flat(resumed)) == (1, epochs[1])


def test_after_break_the_position_is_that_of_the_break():
    (reference,), (loader,), (resumed,) = (loaders("shuffle") for _ in range(3))
    epoch = flat(reference)
    for step, _ in enumerate(loader):
        if step == 4:
            break
    resumed.load_state_dict(stored(loader.state_dict()))
    assert flat(resumed) == epoch[10:]


@given(
    kind=st.sampled_from(["sequential", "shuffle", "seedable", "foreign sampler"]),
    length=st.integers(1, 40),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stop=st.integers(0, 10),
    even=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_another_world_size_gets_exactly_the_rest(kind, length, sizes, worlds, stop, even):
    (reference,) = loaders(kind, length=length)
    epochs = [flat(reference) for _ in range(2)]
    before = loaders(kind, worlds[0], length=length, batch_size=sizes[0], even_batches=even)
    stop = min(stop, len(before[-1]))
    parts = [[batch.tolist() for _, batch in zip(range(stop), loader, strict=False)] for loader in before]
    seen = [item for step in range(stop) for part in parts for item in part[step]]

    state = stored(before[0].state_dict())
    after = loaders(kind, worlds[1], length=length, batch_size=sizes[1], seed=99, even_batches=even)
    for loader in after:
        loader.load_state_dict(state)
    rest, following = dealt(after), dealt(after)

    consumed = min(len(seen), length)
    assert seen[:length] == epochs[0][:consumed]
    assert rest[: length - consumed] == epochs[0][consumed:]
    padding = rest[length - consumed :]
    assert padding == [epochs[0][i % length] for i in range(len(padding))]
    assert len(padding) < sizes[1] * worlds[1]
    if not even:
        assert not padding
    assert following[:length] == epochs[1]


@given(
    length=st.integers(1, 30),
    batch_size=st.integers(1, 4),
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stop=st.integers(0, 8),
)
@settings(deadline=None, max_examples=40)
def test_dropped_rounds_stay_dropped(length, batch_size, worlds, stop):
    def group(world):
        data = torch.arange(length)
        return [
            prepare_data_loader(DataLoader(data, batch_size, drop_last=True), num_processes=world, process_index=rank)
            for rank in range(world)
        ]

    before, after = group(worlds[0]), group(worlds[1])
    stop = min(stop, len(before[0]))
    for loader in before:
        for _, _ in zip(range(stop), loader, strict=False):
            pass
    for loader in after:
        loader.load_state_dict(before[0].state_dict())
    start, size = stop * batch_size * worlds[0], batch_size * worlds[1]
    assert dealt(after) == list(range(start, start + (length - start) // size * size))


@pytest.mark.parametrize("kind", ["sequential", "shuffle", "seedable", "foreign sampler"])
def test_split_batches_resume(kind):
    (reference,) = loaders(kind, length=21)
    epoch = flat(reference)
    before = loaders(kind, 2, length=21, batch_size=4, split_batches=True)
    for loader in before:
        for _, _ in zip(range(3), loader, strict=False):
            pass
    after = loaders(kind, 3, length=21, batch_size=3, split_batches=True, seed=5)
    for loader in after:
        loader.load_state_dict(before[1].state_dict())
    assert dealt(after) == epoch[12:]


def test_batches_of_a_foreign_batch_sampler_resume_on_another_world_size():
    before, after = loaders("foreign batches", 2), loaders("foreign batches", 3)
    for loader in before:
        next(iter(loader))
    for loader in after:
        loader.load_state_dict(before[0].state_dict())
    assert dealt(after) == [*range(4, 24), 0, 1, 2, 3]


# ---- skipping


@pytest.mark.parametrize("kind", KINDS)
def test_skipping_gives_a_new_loader_and_leaves_the_old_one(kind):
    (reference,), (loader,) = loaders(kind), loaders(kind)
    epochs = [flat(reference) for _ in range(2)]
    skipped = skip_first_batches(loader, 5)
    assert (len(skipped), len(loader)) == (7, 12)
    assert flat(skipped) == epochs[0][10:]
    assert loader.iteration == 1
    assert flat(loader) == epochs[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_load_then_skip_by_hand(workers):
    """The pattern of scripts (and of transformers' Trainer): the count of batches done is skipped after loading."""
    (reference,), (loader,), (resumed,) = (loaders("shuffle", workers=workers) for _ in range(3))
    epochs = [flat(reference) for _ in range(3)]
    flat(loader)
    for step, _ in enumerate(loader):
        if step == 3:
            state = loader.state_dict()
            break
    resumed.load_state_dict(stored(state))
    seen = []
    for epoch in (1, 2):
        resumed.set_epoch(epoch)
        active = skip_first_batches(resumed, 4) if epoch == 1 else resumed
        for batch in active:
            seen += batch.tolist()
    assert seen == epochs[1][8:] + epochs[2]


def test_the_state_follows_a_skipping_loader():
    (reference,), (loader,), (resumed,) = (loaders("shuffle") for _ in range(3))
    epoch = flat(reference)
    iterator = iter(skip_first_batches(loader, 2))
    next(iterator)
    resumed.load_state_dict(stored(loader.state_dict()))
    assert flat(resumed) == epoch[6:]


def test_batches_skipped_after_the_end_of_an_epoch_are_the_next_ones():
    (reference,), (loader,), (resumed,) = (loaders("shuffle") for _ in range(3))
    epochs = [flat(reference) for _ in range(2)]
    for _ in loader:
        state = loader.state_dict()
    resumed.load_state_dict(state)
    assert flat(skip_first_batches(resumed, 3)) == epochs[1][6:]


def test_skipping_twice_and_too_much():
    (loader,) = loaders("sequential")
    assert flat(skip_first_batches(skip_first_batches(loader, 3), 7)) == [20, 21, 22, 23]
    assert flat(skip_first_batches(loader, 50)) == []
    assert len(skip_first_batches(loader, 50)) == 0
    with pytest.raises(DataLoaderError, match="-1"):
        skip_first_batches(loader, -1)


def test_skipping_batches_of_ordinary_loaders():
    data = torch.arange(10)
    assert flat(skip_first_batches(DataLoader(data, batch_size=3), 2)) == [6, 7, 8, 9]
    one_by_one = skip_first_batches(DataLoader(data, batch_size=None), 7)
    assert [int(item) for item in one_by_one] == [7, 8, 9]
    with pytest.raises(DataLoaderError, match="-1"):
        skip_first_batches(DataLoader(data), -1)


# ---- epochs


def test_choosing_another_epoch_leaves_the_loaded_one():
    (reference,), (loader,), (resumed,) = (loaders("shuffle") for _ in range(3))
    epochs = [flat(reference) for _ in range(2)]
    for _ in loader:
        state = loader.state_dict()
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert flat(resumed) == epochs[1]


def test_choosing_the_loaded_epoch_keeps_the_position():
    (reference,), (loader,) = loaders("seedable"), loaders("seedable")
    loader.load_state_dict(reference.state_dict() | {"epoch": 3, "samples_consumed": 20})
    loader.set_epoch(3)
    reference.set_epoch(3)
    assert flat(loader) == flat(reference)[20:]


# ---- copies, and what is refused


def test_loaders_pickle_with_their_position():
    (reference,), (loader,) = loaders("shuffle"), loaders("shuffle")
    epoch = flat(reference)
    iterator = iter(loader)
    next(iterator)
    twin = pickle.loads(pickle.dumps(loader))
    assert twin.state_dict()["samples_consumed"] == 2
    twin.load_state_dict(twin.state_dict())
    assert flat(twin) == epoch[2:]


def test_loading_while_reading_belongs_to_the_next_iteration():
    (loader,) = loaders("sequential")
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(loader.state_dict() | {"epoch": 5, "samples_consumed": 20})
    assert sum(1 for _ in iterator) == 11
    assert (loader.iteration, flat(loader)) == (5, [20, 21, 22, 23])


def test_resuming_says_where(caplog):
    (loader,) = loaders("sequential")
    loader.load_state_dict(loader.state_dict() | {"epoch": 4, "samples_consumed": 6})
    with caplog.at_level(logging.INFO, "accel_data"):
        assert flat(loader) == list(range(6, 24))
    assert "epoch 4 continues after 6 of 24 samples" in caplog.text


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("sequential", {"length": 25}, "saved over 25 samples, but this loader has 24"),
        ("sequential", {"version": 2}, "version 2"),
        ("sequential", {"version": None}, "no version"),
        ("sequential", {"order": "generator"}, "'generator' order.*'fixed'"),
        ("sequential", {"samples_consumed": 25}, "25 samples consumed"),
        ("sequential", {"epoch": -1}, "epoch -1"),
        ("shuffle", {"order": "fixed"}, "'fixed' order.*'generator'"),
        ("foreign batches", {"batch_size": 3}, "batches of 3 samples"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(kind, change, message):
    (loader,) = loaders(kind)
    state = {key: value for key, value in (loader.state_dict() | change).items() if value is not None}
    with pytest.raises(DataStateError, match=message):
        loader.load_state_dict(state)


def test_a_state_of_another_kind_of_batch_sampler_is_refused():
    (ordinary,), (foreign,) = loaders("sequential"), loaders("foreign batches")
    with pytest.raises(DataStateError, match="does not count batches"):
        foreign.load_state_dict(ordinary.state_dict())


def test_a_seek_costs_no_reading():
    """Skipping almost all of a long epoch draws one order and fetches one batch."""

    class Long(torch.utils.data.Dataset):
        fetched = 0

        def __getitem__(self, index):
            Long.fetched += 1
            return index

        def __len__(self):
            return 1_000_000

    torch.manual_seed(0)
    loader = prepare_data_loader(DataLoader(Long(), batch_size=4, shuffle=True), num_processes=2, process_index=1)
    batch = next(iter(skip_first_batches(loader, 124_000)))
    order = torch.randperm(
        1_000_000, generator=torch.Generator().manual_seed(loader.synchronized_generator.initial_seed())
    )
    assert batch.tolist() == order[992_004:992_008].tolist()
    assert Long.fetched == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_may_count_batches_itself(kind):
    (reference,), (loader,) = loaders(kind), loaders(kind)
    epochs = [flat(reference) for _ in range(3)]
    assert flat(loader) == epochs[0]
    for step, _ in enumerate(loader):
        if step == 3:
            break
    (resumed,) = loaders(kind, seed=99)
    resumed.load_state_dict(stored(loader.state_dict()))
    resumed.resumes_mid_epoch = False
    assert [item for step, batch in enumerate(resumed) if step > 3 for item in batch.tolist()] == epochs[1][8:]
    assert flat(resumed) == epochs[2]
