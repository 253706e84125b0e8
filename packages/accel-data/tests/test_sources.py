"""Data sets in shards of their own: whole shards to ranks and workers, one end, one position for all."""

import copy
import json
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_data import gather_for_metrics, prepare_data_loader, skip_first_batches
from accel_data.sources import take_shard
from accel_state import GradientState, PartialState
from accel_state.errors import CollectiveMismatchError, DataLoaderError, DataStateError


class Files(IterableDataset):
    """`sizes[i]` samples in shard i: 100 * i, 100 * i + 1, ..."""

    def __init__(self, sizes, mine=None):
        self.sizes, self.mine, self.epochs = list(sizes), mine, []

    @property
    def num_shards(self):
        return len(self.sizes)

    def shard(self, index, count):
        assert count == self.num_shards
        return type(self)(self.sizes, index)

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        assert get_worker_info() is None  # whole shards: nothing is left to divide
        yield from range(100 * self.mine, 100 * self.mine + self.sizes[self.mine])


class Seekable(Files):
    read = 0

    def skip(self, n):
        class Rest:
            def __iter__(inner):
                yield from range(100 * self.mine + n, 100 * self.mine + self.sizes[self.mine])

        return Rest()

    def __iter__(self):
        for sample in super().__iter__():
            type(self).read += 1
            yield sample


def samples(sizes):
    return sorted(100 * i + n for i, size in enumerate(sizes) for n in range(size))


def values(loader):
    return [batch.tolist() for batch in loader]


def flat(batches):
    return [item for batch in batches for item in batch]


def prepared(sizes, batch_size=2, workers=0, kind=Files, drop_last=False, **how):
    state = PartialState(cpu=True)
    source = DataLoader(kind(sizes), batch_size=batch_size, num_workers=workers, drop_last=drop_last)
    return prepare_data_loader(
        source, num_processes=state.num_processes, process_index=state.process_index, put_on_device=True, **how
    )


def read(sizes, how):
    loader = prepared(sizes, **how)
    got, ends, kept = [], [], []
    for batch in loader:
        got.append(batch.tolist())
        ends.append(loader.end_of_dataloader)
        kept.append(loader.tail.real if loader.tail and loader.tail.is_padded else len(batch))
    return got, ends, kept


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sizes", [[5, 4, 3, 4], [40, 4, 8, 3, 9], [34, 2], [0, 0], [16, 16], [32, 32, 2, 2]])
def test_every_sample_once_and_one_end(ranks, workers, sizes):
    both = ranks(read, 2, sizes, {"workers": workers})
    steps = {len(got) for got, _, _ in both}
    assert len(steps) == 1
    for got, ends, _ in both:
        assert ends == [False] * (len(got) - 1) + [True] * bool(got)
    real = [item for got, _, kept in both for batch, n in zip(got, kept, strict=True) for item in batch[:n]]
    assert sorted(real) == samples(sizes)


@pytest.mark.parametrize("how", [{"even_batches": False}, {"drop_last": True}])
def test_all_may_stop_with_the_first(ranks, how):
    first, second = ranks(read, 2, [20, 6, 3], how)
    assert len(first[0]) == len(second[0]) == 3
    assert second[0] == [[100, 101], [102, 103], [104, 105]]
    assert first[1] == second[1] == [False, False, True]


def fails(sizes):
    with pytest.raises(DataLoaderError) as caught:
        values(prepared(sizes))
    return str(caught.value)


def test_a_rank_without_anything_to_repeat_fails_everywhere(ranks):
    first, second = ranks(fails, 2, [4, 0])
    assert first == second
    assert "The shards of rank 1 hold no batch" in first


def resumed(sizes, state, how):
    loader = prepared(sizes, **how)
    if state is None:
        seen = [batch.tolist() for _, batch in zip(range(3), loader, strict=False)]
        return flat(seen), copy.deepcopy(loader.state_dict())
    loader.load_state_dict(state)
    assert loader.state_dict() | {"num_processes": 0} == state | {"num_processes": 0}
    got = []
    for batch in loader:
        kept = loader.tail.real if loader.tail and loader.tail.is_padded else len(batch)
        got += batch.tolist()[:kept]
    return got, loader.state_dict()


@pytest.mark.parametrize(("before", "after"), [((2, 2), (3, 0)), ((2, 0), (1, 2)), ((1, 1), (2, 0)), ((3, 0), (2, 1))])
@pytest.mark.parametrize("kind", [Files, Seekable])
def test_an_epoch_continues_on_any_ranks_and_workers(ranks, before, after, kind):
    sizes = [9, 7, 8, 12, 5, 6]
    first = ranks(resumed, before[0], sizes, None, {"workers": before[1], "kind": kind})
    states = [state for _, state in first]
    assert all(state == states[0] for state in states)
    state = json.loads(json.dumps(states[0]))
    second = ranks(resumed, after[0], sizes, state, {"workers": after[1], "kind": kind})
    assert sorted(flat(seen for seen, _ in first + second)) == samples(sizes)
    assert {state["epoch"] for _, state in second} == {1}
    assert all(state["shard_positions"] == [0] * 6 for _, state in second)


def measured():
    state = GradientState()
    loader = prepared([9, 30], gradient_state=state)
    return sorted(flat(gather_for_metrics(batch, gradient_state=state).tolist() for batch in loader))


def test_metrics_hold_each_sample_once(ranks):
    assert ranks(measured, 2) == [samples([9, 30])] * 2


def one_leaves():
    state = PartialState(cpu=True)
    loader = prepared([30, 30])
    iterator = iter(loader)
    next(iterator)
    if state.process_index == 1:
        torch.distributed.destroy_process_group()
        return "left"
    with pytest.raises(CollectiveMismatchError) as caught:
        list(iterator)
    return str(caught.value)


def test_a_rank_that_leaves_is_noticed(ranks):
    said, _ = ranks(one_leaves, 2)
    assert "Another rank did not say how many batches of the stream it found" in said


def stopped(sizes, steps, how):
    """Some steps, and the real samples among them; then the state."""
    loader = prepared(sizes, **how)
    seen = []
    for _, batch in zip(range(steps), loader, strict=False):
        seen += [] if loader.tail is not None and loader.tail.real == 0 else batch.tolist()
    return seen, copy.deepcopy(loader.state_dict())


def continued(sizes, state, how):
    loader = prepared(sizes, **how)
    loader.load_state_dict(state)
    rest, padding = [], []
    for batch in loader:
        (padding if loader.tail is not None and loader.tail.real == 0 else rest).extend(batch.tolist())
    return rest, padding, loader.state_dict()["epoch"], len(values(loader))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("sizes", "steps", "before", "after"),
    [([30, 6], 5, 2, 2), ([10, 9, 31], 10, 1, 2), ([6, 20, 8, 30], 4, 2, 3), ([4, 30], 9, 2, 1)],
)
def test_a_pass_continues_where_some_shards_are_used_up(ranks, sizes, steps, before, after, workers):
    how = {"workers": workers}
    first = ranks(stopped, before, sizes, steps, how)
    second = ranks(continued, after, sizes, first[0][1], how)
    seen = [item for of_rank in first for item in of_rank[0]] + [item for of_rank in second for item in of_rank[0]]
    assert sorted(seen) == samples(sizes)
    assert len({len(rest) + len(padding) for rest, padding, _, _ in second}) == 1
    assert {epoch for _, _, epoch, _ in second} == {1}


def test_shards_that_are_left_are_dealt_anew_to_another_number_of_ranks(ranks):
    how = {"even_batches": False}
    first = ranks(stopped, 1, [10, 9, 31, 30], 10, how)
    state = first[0][1]
    assert state["finished_shards"] == [0, 1]
    second = ranks(continued, 2, [10, 9, 31, 30], state, how)
    assert [rest for rest, _, _, _ in second] == [list(range(201, 231)), list(range(300, 330))]


def changes_batches(how):
    """A loop that takes its batches apart, in place."""
    loader = prepared([10, 4], kind=Named, **how)
    found = []
    for batch in loader:
        found.append(batch.pop("number").tolist())
        batch["other"].mul_(0)
    return found


class Named(Files):
    def __iter__(self):
        return ({"number": number, "other": torch.ones(3)} for number in super().__iter__())


def test_what_is_repeated_is_as_it_was_read(ranks):
    first, second = ranks(changes_batches, 2, {})
    assert first == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert second == [[100, 101], [102, 103], [100, 101], [102, 103], [100, 101]]


def on_a_mesh(state):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    loader = prepare_data_loader(DataLoader(Files([12, 4]), batch_size=2), torch_device_mesh=mesh)
    if state is None:
        seen = [batch.tolist() for _, batch in zip(range(2), loader, strict=False)]
        return seen, copy.deepcopy(loader.state_dict())
    loader.load_state_dict(state)
    return values(loader), None


def started_on_a_mesh(state=None):
    PartialState(cpu=True)
    return on_a_mesh(state)


def test_ranks_of_one_part_agree_with_the_others(ranks):
    whole = ranks(started_on_a_mesh, 4)
    assert [state["shard_positions"] for _, state in whole] == [[4, 4]] * 4
    assert whole[0][0] == whole[1][0] == [[0, 1], [2, 3]]
    assert whole[2][0] == whole[3][0] == [[100, 101], [102, 103]]
    rest = ranks(started_on_a_mesh, 4, whole[2][1])
    assert rest[0][0] == rest[1][0] == [[4, 5], [6, 7], [8, 9], [10, 11]]
    assert rest[2][0] == rest[3][0] == [[100, 101], [102, 103]] * 2


def breaks_apart():
    loader = prepared([40, 40])
    steps = (2, 7)[PartialState().process_index]
    for _, _ in zip(range(steps), loader, strict=False):
        pass
    with pytest.raises(CollectiveMismatchError) as caught:
        values(loader)
    return str(caught.value)


def test_ranks_that_left_at_different_steps_are_told(ranks):
    first, second = ranks(breaks_apart, 2)
    assert first == second
    assert "rank 0 iterates it for the 2. time and has read 0 batches" in first
    assert "rank 1 iterates it for the 1. time and has read 8 batches" in first


class Broken(Files):
    """Shard 1 cannot be read to its end."""

    def __iter__(self):
        for number, sample in enumerate(super().__iter__()):
            if self.mine == 1 and number == 27:
                raise OSError("the disk is gone")
            yield sample


def one_fails(workers):
    loader = prepared([60, 60], kind=Broken, workers=workers)
    first = []
    with pytest.raises((DataLoaderError, OSError)) as caught:
        for batch in loader:
            first += batch.tolist()
    said = f"{type(caught.value).__name__}: {caught.value}"
    return said, len(first), len(values(prepared([4, 4])))  # ranks still go together


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_that_cannot_read_is_told_to_the_others(ranks, workers):
    first, second = ranks(one_fails, 2, workers)
    assert first[0] == "DataLoaderError: Rank 1 could not read its shards of the stream; its own error says why."
    assert second[0].startswith("OSError: ")
    assert "the disk is gone" in second[0]
    assert first[2] == second[2] == 2


# ---- on one process


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_skips_and_copies(workers):
    loader = prepared([6, 5], workers=workers)
    epoch = values(loader)
    assert sorted(flat(epoch)) == samples([6, 5])
    assert values(skip_first_batches(loader, 2)) == epoch[2:]
    assert values(pickle.loads(pickle.dumps(loader))) == values(loader) == epoch
    assert loader.iteration == 3
    loader.set_epoch(7)
    assert loader.dataset.dataset.epochs[-1] == 7


class Telling(Files):
    def __iter__(self):
        return iter([self.told])

    def shard(self, index, count):
        shard = super().shard(index, count)
        shard.told = self.epochs[-1]
        return shard


def test_persistent_workers_are_told_the_epoch_and_the_place():
    source = DataLoader(Telling([1]), num_workers=1, persistent_workers=True)
    loader = prepare_data_loader(source, num_processes=1, process_index=0)
    assert [flat(values(loader)) for _ in range(3)] == [[0], [1], [2]]


def test_a_shard_that_can_skip_is_not_read():
    loader = prepared([50], kind=Seekable)
    iterator = iter(loader)
    for _ in range(20):
        next(iterator)
    state = loader.state_dict()
    Seekable.read = 0
    again = prepared([50], kind=Seekable)
    again.load_state_dict(state)
    assert next(iter(again)).tolist() == [40, 41]
    assert Seekable.read == 0


def test_positions_in_other_shards_are_refused():
    state = prepared([5, 5]).state_dict()
    with pytest.raises(DataStateError, match="positions in 2 shards, but this data set comes in 3"):
        prepared([5, 5, 5]).load_state_dict(state)


def test_alone_ranks_without_a_group_hold_their_own_positions():
    loaders = [
        prepare_data_loader(DataLoader(Files([4, 6]), batch_size=2), num_processes=2, process_index=rank)
        for rank in range(2)
    ]
    for loader in loaders:
        next(iter(loader))
    states = [loader.state_dict() for loader in loaders]
    assert [state["shard_positions"] for state in states] == [[2, 0], [0, 2]]
    loaders[1].load_state_dict(states[1])
    assert values(loaders[1]) == [[102, 103], [104, 105]]
    with pytest.raises(DataStateError, match="holds only the shards of rank 1 of 2"):
        loaders[0].load_state_dict(states[1])
    with pytest.raises(DataStateError, match="holds only the shards of rank 0 of 2"):
        prepared([4, 6]).load_state_dict(states[0])


class Forgetful(Files):
    """Its shards begin at epoch 0, whatever epoch it was in, as those of Hugging Face's streams."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from (10 * self.epoch + number for number in range(self.sizes[self.mine]))


@pytest.mark.parametrize("workers", [0, 1])
def test_shards_are_told_the_epoch(workers):
    loader = prepared([2], kind=Forgetful, workers=workers)
    assert [values(loader) for _ in range(3)] == [[[0, 1]], [[10, 11]], [[20, 21]]]


def test_the_collate_function_of_a_worker_sees_the_worker():
    def collate(items):
        return [get_worker_info().id, *items]

    source = DataLoader(Files([4, 2]), batch_size=2, num_workers=2, collate_fn=collate)
    loader = prepare_data_loader(source, num_processes=1, process_index=0)
    assert list(loader) == [[0, 0, 1], [1, 100, 101], [0, 2, 3]]


def test_a_loader_is_pickled_in_the_middle_of_a_pass():
    loader = prepared([8])
    next(iter(loader))
    twin = pickle.loads(pickle.dumps(loader))
    assert twin.state_dict()["shard_positions"] == [2]
    assert values(twin) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_too_few_shards_are_read_as_one_stream():
    class Whole(Files):
        def __iter__(self):
            return iter(range(8))

    loader = prepare_data_loader(DataLoader(Whole([8]), batch_size=2), num_processes=2, process_index=1)
    assert values(loader) == [[2, 3], [6, 7]]


def test_hugging_faces_order_of_parameters_is_understood():
    class Foreign:
        def shard(self, num_shards, index, contiguous=True):
            return num_shards, index

    assert take_shard(Foreign(), 1, 4) == (4, 1)


def test_batches_made_by_the_data_set_itself():
    class Tensors(Files):
        def __iter__(self):
            yield from (torch.full((2,), self.mine) for _ in range(self.sizes[self.mine]))

    loader = prepare_data_loader(DataLoader(Tensors([2, 1]), batch_size=None), num_processes=1, process_index=0)
    assert values(loader) == [[0, 0], [0, 0], [1, 1]]
    assert loader.total_batch_size is None
