"""Iterable data sets: every rank reads the stream and keeps its own samples."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_data import IterableDatasetShard, SkipDataLoader, prepare_data_loader, skip_first_batches
from accel_state.errors import DataLoaderError, DataStateError


class Numbers(IterableDataset):
    def __init__(self, length, first=0):
        self.length, self.first, self.made, self.epochs = length, first, 0, []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        for number in range(self.first, self.length):
            self.made += 1
            yield number


class Jumping(Numbers):
    def skip(self, n):
        self.jumped = Jumping(self.length, self.first + n)
        return self.jumped


class PerWorker(IterableDataset):
    def __iter__(self):
        worker = get_worker_info().id
        return iter(range(100 * worker, 100 * worker + 12))


def prepared(loader, world=2, rank=0, **how):
    return prepare_data_loader(loader, num_processes=world, process_index=rank, **how)


def batches(loader):
    return [batch.tolist() for batch in loader]


# Recorded from Accelerate 1.15 with dispatch_batches=False.
@pytest.mark.parametrize(
    ("length", "drop_last", "how", "expected"),
    [
        (1, False, {}, [[[0, 0, 0, 0]], [[0, 0, 0, 0]]]),
        (3, False, {}, [[[0, 1, 2, 0]], [[1, 2, 0, 1]]]),
        (13, False, {}, [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 0, 1, 2]]]),
        (13, True, {}, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]),
        (5, False, {"split_batches": True}, [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]),
        (0, False, {}, [[], []]),
    ],
)
def test_ranks_get_what_accelerate_gives_them(length, drop_last, how, expected):
    source = DataLoader(Numbers(length), batch_size=4, drop_last=drop_last)
    assert [batches(prepared(source, rank=rank, **how)) for rank in (0, 1)] == expected


def test_uneven_parts_and_items_without_batches():
    source = DataLoader(Numbers(5), batch_size=4)
    assert [batches(prepared(source, rank=rank, even_batches=False)) for rank in (0, 1)] == [[[0, 1, 2, 3]], [[4]]]
    single = DataLoader(Numbers(5), batch_size=None)
    assert [list(prepared(single, rank=rank)) for rank in (0, 1)] == [[0, 2, 4], [1, 3, 0]]


def test_the_end_is_known_with_the_last_batch():
    loader = prepared(DataLoader(Numbers(13), batch_size=4), rank=1)
    assert [loader.end_of_dataloader for _ in loader] == [False, True]
    assert (loader.remainder, loader.tail.size, loader.tail.real) == (5, 4, 1)
    alone = prepared(DataLoader(Numbers(5), batch_size=4), world=1)
    assert [alone.end_of_dataloader for _ in alone] == [False, True]


def test_a_stream_resumes_on_another_world_size():
    before = [prepared(DataLoader(Numbers(20), batch_size=2), rank=rank) for rank in (0, 1)]
    for loader in before:
        for _, _ in zip(range(2), loader, strict=False):
            pass
    after = [prepared(DataLoader(Numbers(20), batch_size=3), world=3, rank=rank) for rank in range(3)]
    for loader in after:
        loader.load_state_dict(before[0].state_dict())
    first, second, third = (batches(loader) for loader in after)
    dealt = [item for step in zip(first, second, third, strict=True) for batch in step for item in batch]
    assert dealt == [*range(8, 20), *range(6)]
    assert batches(after[0])[0] == [0, 1, 2]


def test_a_stream_that_can_jump_is_not_read_to_skip():
    stream = Jumping(1000)
    loader = skip_first_batches(prepared(DataLoader(stream, batch_size=10), world=1), 90)
    assert next(iter(loader)).tolist() == list(range(900, 910))
    assert (stream.made, stream.jumped.made) == (0, 20)


def test_what_is_skipped_is_not_collated():
    collated = []

    def collate(items):
        collated.append(items)
        return torch.tensor(items)

    loader = prepared(DataLoader(Numbers(1000), batch_size=10, collate_fn=collate), world=1)
    assert next(iter(skip_first_batches(loader, 90))).tolist() == list(range(900, 910))
    assert len(collated) == 2
    ordinary = skip_first_batches(DataLoader(Numbers(1000), batch_size=10), 90)
    assert isinstance(ordinary, SkipDataLoader)
    assert next(iter(ordinary)).tolist() == list(range(900, 910))


def test_with_workers_positions_count_batches_and_keep_the_world():
    def loader(world=1, rank=0):
        return prepared(DataLoader(PerWorker(), batch_size=3, num_workers=2), world=world, rank=rank)

    first, resumed = loader(), loader()
    whole = batches(first)
    for _, _ in zip(range(3), first, strict=False):
        pass
    resumed.load_state_dict(first.state_dict())
    assert batches(resumed) == whole[3:]
    with pytest.raises(DataStateError, match=r"1 ranks.*2.*num_workers=0"):
        loader(world=2).load_state_dict(first.state_dict())
    with pytest.raises(DataStateError, match="does not count samples"):
        prepared(DataLoader(PerWorker(), batch_size=3), world=1).load_state_dict(first.state_dict())


def test_a_stream_is_told_the_epoch():
    stream = Numbers(4)
    loader = prepared(DataLoader(stream, batch_size=2))
    for _ in range(3):
        list(loader)
    assert sorted(set(stream.epochs)) == [0, 1, 2]


class Drawn(IterableDataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        yield from torch.randperm(12, generator=self.generator).tolist()


def test_the_generator_of_a_stream_is_saved():
    reference, first, resumed = (prepared(DataLoader(Drawn(), batch_size=2), world=1) for _ in range(3))
    epochs = [batches(reference) for _ in range(3)]
    list(first)
    iterator = iter(first)
    next(iterator)
    resumed.load_state_dict(first.state_dict())
    assert batches(resumed) == epochs[1][1:]
    assert batches(resumed) == epochs[2]


def test_leaving_an_epoch_reads_the_stream_on():
    reference, first, resumed = (prepared(DataLoader(Drawn(), batch_size=2), world=1) for _ in range(3))
    epochs = [batches(reference) for _ in range(2)]
    next(iter(first))
    resumed.load_state_dict(first.state_dict())
    resumed.set_epoch(1)
    assert batches(resumed) == epochs[1]


def test_lengths():
    class Sized(Numbers):
        def __len__(self):
            return self.length

    assert [len(IterableDatasetShard(Sized(13), 4, drop, 2, 0)) for drop in (False, True)] == [8, 4]
    loader = prepared(DataLoader(Sized(13), batch_size=4))
    assert (len(loader), loader.total_dataset_length, loader.total_batch_size) == (2, 13, 8)
    assert len(prepared(DataLoader(Sized(13), batch_size=4), world=1)) == 4


def test_a_rank_out_of_range_is_refused():
    with pytest.raises(DataLoaderError, match="process_index is 3"):
        IterableDatasetShard(Numbers(3), num_processes=2, process_index=3)


class Stateful(IterableDataset):
    """Tells where it stands, and begins anew unless it was just put back."""

    def __init__(self, length):
        self.length, self.position, self.is_put_back, self.made = length, 0, False, 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position, self.is_put_back = state["position"], True

    def __iter__(self):
        if not self.is_put_back:
            self.position = 0
        self.is_put_back = False
        while self.position < self.length:
            self.made += 1
            self.position += 1
            yield self.position - 1


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (2, 3)])
def test_a_stream_that_tells_its_state_is_put_back_instead_of_read(before, after):
    group = [prepared(DataLoader(Stateful(60), batch_size=2), before, rank) for rank in range(before)]
    seen = []
    for loader in group:
        for _, batch in zip(range(4), loader, strict=False):
            seen += batch.tolist()
    state = group[-1].state_dict()
    assert state["source_state"] == {"position": 8 * before}
    sources = [Stateful(60) for _ in range(after)]
    resumed = [prepared(DataLoader(source, batch_size=2), after, rank) for rank, source in enumerate(sources)]
    rest = []
    for loader in resumed:
        loader.load_state_dict(state)
        assert loader.state_dict()["source_state"] == state["source_state"]
        for batch in loader:
            rest += batch.tolist()[: loader.tail.real if loader.tail else None]
    assert sorted(seen + rest) == list(range(60))
    assert [source.made for source in sources] == [60 - 8 * before] * after
    assert batches(resumed[0])[0] == [0, 1]  # the next epoch is whole
    assert "source_state" not in resumed[0].state_dict()


class Split(IterableDataset):
    """Worker w reads its own numbers: lengths[w] of them, from 100 w on."""

    def __init__(self, *lengths):
        self.lengths = lengths

    def __iter__(self):
        worker = get_worker_info().id
        return iter(range(100 * worker, 100 * worker + self.lengths[worker]))


def everything(lengths):
    return sorted(100 * worker + i for worker, length in enumerate(lengths) for i in range(length))


@pytest.mark.parametrize(
    ("lengths", "world"), [((12, 12), 2), ((13, 3), 2), ((1, 0), 2), ((0, 7), 3), ((0, 0), 2), ((5, 17), 3), ((18,), 2)]
)
def test_workers_say_which_samples_only_fill_up_a_round(lengths, world):
    def real(rank):
        loader = prepared(DataLoader(Split(*lengths), batch_size=3, num_workers=len(lengths)), world, rank)
        found, ends = [], []
        for batch in loader:
            tail = loader.tail
            assert len(batch) == 3 == (3 if tail is None else tail.size)
            found += batch.tolist()[: 3 if tail is None else tail.real]
            ends.append(loader.end_of_dataloader)
        assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)
        return found, len(ends)

    parts, counts = zip(*(real(rank) for rank in range(world)), strict=True)
    assert len(set(counts)) == 1
    assert sorted(number for part in parts for number in part) == everything(lengths)


def test_workers_tell_the_remainder_of_the_last_round():
    loader = prepared(DataLoader(Split(2, 13), batch_size=3, num_workers=2))
    assert [loader.remainder for _ in loader] == [-1, -1, -1, 1]
    loader = prepared(DataLoader(Split(12, 12), batch_size=3, num_workers=2))
    assert [(loader.end_of_dataloader, loader.tail) for _ in loader][-1] == (True, None)
    assert loader.remainder == 0


@pytest.mark.parametrize("served", [0, 2, 3, 4])
def test_a_resumed_stream_of_workers_knows_its_end_too(served):
    source = DataLoader(Split(5, 17), batch_size=3, num_workers=2)
    first, resumed = prepared(source, rank=1), prepared(source, rank=1)
    whole = [(batch.tolist(), first.tail, first.end_of_dataloader) for batch in first]
    resumed.load_state_dict(first.state_dict())
    assert batches(resumed) == whole_batches(whole)  # the next epoch
    for _, _ in zip(range(served), first, strict=False):
        pass
    resumed.load_state_dict(first.state_dict())
    assert [(batch.tolist(), resumed.tail, resumed.end_of_dataloader) for batch in resumed] == whole[served:]


def whole_batches(noted):
    return [batch for batch, _, _ in noted]


@pytest.mark.parametrize("lengths", [(4, 4), (10, 1), (2, 11), (1, 0), (4, 17)])
def test_ranks_whose_workers_run_dry_fail_at_one_step(lengths):
    served = []
    for rank in range(3):
        source = DataLoader(Split(*lengths), batch_size=2, num_workers=len(lengths))
        free = batches(prepared(source, 3, rank, even_batches=False))
        loader = prepared(source, 3, rank, even_batches=False)
        loader.ranks_will_meet = lambda: True
        seen = []
        with pytest.raises(DataLoaderError, match=r"ranks from [12] on have none left"):
            for batch in loader:
                loader.ranks_met = True
                seen.append(batch.tolist())
        assert seen == free[: len(seen)]
        served.append((len(seen), len(free)))
    assert len({seen for seen, _ in served}) == 1
    assert served[0][0] == min(whole for _, whole in served)


def test_single_items_of_workers_are_dealt_to_ranks():
    parts = [list(prepared(DataLoader(Split(3, 4), batch_size=None, num_workers=2), rank=rank)) for rank in (0, 1)]
    assert parts == [[0, 100, 2, 102], [1, 101, 0, 103]]


class Between(IterableDataset):
    def __init__(self, start, end):
        self.start, self.end = start, end

    def __iter__(self):
        return iter(range(self.start, self.end))


def split_between_workers(worker):
    """As torch's documentation of `IterableDataset` has it."""
    info = get_worker_info()
    dataset = info.dataset
    start, end = dataset.start, dataset.end
    share = -(-(end - start) // info.num_workers)
    dataset.start = start + worker * share
    dataset.end = min(dataset.start + share, end)


def test_a_worker_init_function_sees_the_users_data_set():
    source = DataLoader(Between(3, 11), batch_size=2, num_workers=2, worker_init_fn=split_between_workers)
    loader = prepared(source, world=1)
    assert batches(loader) == [[3, 4], [7, 8], [5, 6], [9, 10]]
    assert loader.worker_init_fn is split_between_workers


class Owned(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return type(get_worker_info().dataset).__name__


def test_seeded_reads_are_not_seen_in_workers():
    loader = prepared(DataLoader(Owned(), batch_size=2, num_workers=1), world=1, seed_per_sample=True)
    assert list(loader) == [["Owned"] * 2]


class Breaking(IterableDataset):
    def __iter__(self):
        yield from range(4)
        raise OSError("torn tape")


def test_a_failing_stream_hands_out_what_it_read_and_names_the_batch():
    loader = prepared(DataLoader(Breaking(), batch_size=2), world=1)
    got = []
    with pytest.raises(OSError, match="torn tape") as caught:
        got.extend(batch.tolist() for batch in loader)
    assert got == [[0, 1], [2, 3]]
    assert caught.value.__notes__ == ["accel-data: this happened while reading batch 2 of the pass"]


class Counting:
    """A collate function that knows how often it was called in a worker."""

    def __init__(self):
        self.calls = 0

    def __call__(self, items):
        self.calls += 1
        return [self.calls, *items]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_workers_do_not_collate_what_is_skipped(world, persistent):
    source = DataLoader(
        Split(60, 60), batch_size=2, num_workers=2, collate_fn=Counting(), persistent_workers=persistent
    )
    first = prepared(source, world)
    whole = [batch[1:] for batch in first]
    for _, _ in zip(range(9), first, strict=False):
        pass
    resumed = prepared(source, world)
    resumed.load_state_dict(first.state_dict())
    rest = list(resumed)
    assert [batch[1:] for batch in rest] == whole[9:]
    assert [batch[0] for batch in rest[:2]] == [1, 2]  # of the nine, the last was read by the first worker: collated
    assert isinstance(resumed.collate_fn, Counting)
    assert [batch[1:] for batch in resumed] == whole


@pytest.mark.parametrize("world", [1, 2])
def test_workers_leave_out_a_short_batch_where_that_is_asked_for(world):
    for lengths in ((5, 4), (3, 1), (11, 12)):
        loader = prepared(DataLoader(Split(*lengths), batch_size=2, num_workers=2, drop_last=True), world)
        kept = [length // (2 * world) * 2 for length in lengths]
        found = batches(loader)
        assert all(len(batch) == 2 for batch in found)
        assert len(found) == sum(kept) // 2
        assert loader.end_of_dataloader
