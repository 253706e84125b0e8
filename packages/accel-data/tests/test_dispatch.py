"""Rank 0 reads, the others are sent their part."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_data import DataLoaderDispatcher, gather_for_metrics, prepare_data_loader, skip_first_batches
from accel_data.rounds import Cutter
from accel_data.wire import decode, encode
from accel_state import GradientState, PartialState
from accel_state.errors import CollectiveMismatchError, DataLoaderError


class Stream(IterableDataset):
    def __init__(self, length):
        self.length, self.made = length, 0

    def __iter__(self):
        for number in range(self.length):
            self.made += 1
            yield number


def prepared(source, **how):
    state = PartialState(cpu=True)
    return prepare_data_loader(
        source, num_processes=state.num_processes, process_index=state.process_index, dispatch_batches=True, **how
    )


def values(loader):
    return [batch.tolist() for batch in loader]


def read_epoch(kind, length, how, loader_how):
    data = Stream(length) if kind == "stream" else torch.arange(length)
    loader = prepared(DataLoader(data, **loader_how), **how)
    assert type(loader) is DataLoaderDispatcher
    got, ends = [], []
    for batch in loader:
        got.append(batch.tolist())
        ends.append(loader.end_of_dataloader)
    made = data.made if kind == "stream" else None
    tail = loader.tail and (loader.tail.size, loader.tail.real)
    return {"got": got, "ends": ends, "made": made, "remainder": loader.remainder, "tail": tail}


@pytest.mark.parametrize("kind", ["stream", "map"])
@pytest.mark.parametrize(
    ("length", "how", "loader_how", "expected"),
    [
        (8, {}, {}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (7, {}, {}, [[[0, 1], [4, 5]], [[2, 3], [6]]]),  # whole batches, of any size
        (5, {}, {}, [[[0, 1], [4]], [[2, 3], [0, 1]]]),  # a rank without a batch gets the first one
        (5, {"even_batches": False}, {}, [[[0, 1], [4]], [[2, 3]]]),
        (5, {}, {"drop_last": True}, [[[0, 1]], [[2, 3]]]),
        (6, {}, {"drop_last": True}, [[[0, 1]], [[2, 3]]]),  # the third batch is full, the round is not
        (1, {}, {}, [[[0]], [[0]]]),
        (0, {}, {}, [[], []]),
        (1, {}, {"drop_last": True}, [[], []]),
        (7, {"split_batches": True}, {"batch_size": 4}, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
        (5, {"split_batches": True, "even_batches": False}, {"batch_size": 4}, [[[0, 1], [4]], [[2, 3]]]),
        (6, {"split_batches": True}, {"batch_size": 4, "drop_last": True}, [[[0, 1]], [[2, 3]]]),
    ],
)
def test_each_rank_gets_its_part_and_knows_the_end(ranks, kind, length, how, loader_how, expected):
    first, second = ranks(read_epoch, 2, kind, length, how, {"batch_size": 2} | loader_how)
    assert [first["got"], second["got"]] == expected
    for of_rank in (first, second):
        full = [False] * (len(of_rank["got"]) - 1) + [True]
        assert of_rank["ends"] == full[: len(of_rank["got"])] or how.get("even_batches") is False
    assert second["made"] in (0, None)  # only rank 0 reads


def test_the_last_round_says_what_of_it_is_real(ranks):
    first, second = ranks(read_epoch, 2, "stream", 5, {}, {"batch_size": 2})
    assert (first["remainder"], first["tail"], second["remainder"], second["tail"]) == (1, (1, 1), 1, (2, 0))
    first, second = ranks(read_epoch, 2, "stream", 7, {"split_batches": True}, {"batch_size": 4})
    assert (first["remainder"], first["tail"], second["remainder"], second["tail"]) == (3, (2, 2), 3, (2, 1))


def odd_batches(items):
    return [torch.ones(len(items), 1 + items[0]), ({str(item) for item in items}, None)]


def read_odd():
    return [
        (tuple(numbers.shape), names)
        for numbers, names in prepared(DataLoader(Stream(6), batch_size=2, collate_fn=odd_batches))
    ]


def test_batches_of_unequal_shapes_and_any_items_are_handed_out_whole(ranks):
    first, second = ranks(read_odd, 2)
    assert first == [((2, 1), ({"0", "1"}, None)), ((2, 5), ({"4", "5"}, None))]
    assert second[0] == ((2, 3), ({"2", "3"}, None))


def count_bytes(split):
    loader = prepared(DataLoader(torch.arange(2**17).view(-1, 2048).float(), batch_size=8), split_batches=split)
    own = sum(batch.nbytes for batch in loader)
    return own, loader._wire.num_bytes_sent


@pytest.mark.parametrize("split", [False, True])
def test_a_rank_is_sent_its_part_and_little_else(ranks, split):
    (_, sent), (own, nothing) = ranks(count_bytes, 2, split)
    assert own <= sent[1] <= 1.05 * own
    assert nothing == {}


def failing(kind):
    class Broken(IterableDataset):
        def __iter__(self):
            yield from range(4)
            raise OSError("the disk is gone")

    collate = (lambda items: (i for i in items)) if kind == "pickle" else None
    source = DataLoader(Broken(), batch_size=1, collate_fn=collate)
    with pytest.raises((OSError, DataLoaderError)) as caught:
        values(prepared(source))
    return type(caught.value).__name__, str(caught.value)


def test_a_failure_of_the_reader_reaches_every_rank(ranks):
    first, second = ranks(failing, 2, "disk")
    assert first == ("OSError", "the disk is gone")
    assert second[0] == "DataLoaderError"
    assert "Rank 0, which reads for all ranks, failed: OSError: the disk is gone" in second[1]
    first, second = ranks(failing, 2, "pickle")
    assert "cannot be sent to other ranks" in first[1]
    assert "cannot be sent to other ranks" in second[1]


def resumed(state):
    torch.manual_seed(PartialState(cpu=True).process_index)
    loader = prepared(DataLoader(torch.arange(24), batch_size=2, shuffle=True, num_workers=1))
    if state is None:
        seen = [batch.tolist() for _, batch in zip(range(2), loader, strict=False)]
        return seen, copy.deepcopy(loader.state_dict())
    loader.load_state_dict(state)
    return values(loader), loader.state_dict()


def test_a_dispatched_epoch_continues_on_another_world(ranks):
    before = ranks(resumed, 2, None)
    assert before[0][1].keys() == before[1][1].keys()
    assert torch.equal(before[0][1]["generator_state"], before[1][1]["generator_state"])
    after = ranks(resumed, 3, before[1][1])
    seen = [item for of_rank in before for batch in of_rank[0] for item in batch]
    rest = [item for of_rank in after for batch in of_rank[0] for item in batch]
    assert sorted(seen) == sorted(set(range(24)) - set(rest))
    assert len(rest) >= 16


class Telling(IterableDataset):
    """Tells where it stands, and counts what is read."""

    def __init__(self, length):
        self.length, self.position, self.num_read = length, 0, 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def __iter__(self):
        while self.position < self.length:
            self.num_read += 1
            self.position += 1
            yield self.position - 1
        self.position = 0


def resumed_stream(state, how):
    stream = Telling(26)
    loader = prepared(DataLoader(stream, batch_size=2, **how))
    if state is None:
        seen = [batch.tolist() for _, batch in zip(range(2), loader, strict=False)]
        return seen, copy.deepcopy(loader.state_dict())
    loader.load_state_dict(state)
    return values(loader), stream.num_read


@pytest.mark.parametrize("how", [{}, {"drop_last": True}])
def test_a_dispatched_stream_is_put_back_by_its_own_state(ranks, how):
    (first, state), (second, other) = ranks(resumed_stream, 2, None, how)
    assert state["source_state"] == {"position": 8}
    assert "source_state" not in other  # rank 0 reads; with its state left out, what was consumed is read and dropped
    assert sorted(x for batch in first + second for x in batch) == list(range(8))
    for loaded, num_read in ((state, 18), (other, 26)):
        after = ranks(resumed_stream, 3, loaded, how)
        assert sorted(x for batches, _ in after for batch in batches for x in batch) == list(range(8, 26))
        assert [count for _, count in after] == [num_read, 0, 0]


class Named(IterableDataset):
    def __iter__(self):
        return ({"number": number, "other": torch.ones(3)} for number in range(10))


def taken_apart(how):
    found = []
    for batch in prepared(DataLoader(Named(), batch_size=2), **how):
        found.append(batch.pop("number").tolist())
        batch["other"].mul_(0)
    return found


def zeroed(how):
    found = []
    for batch in prepared(DataLoader(Stream(6), batch_size=4), **how):
        found.append(batch.tolist())
        batch.mul_(0)
    return found


def test_what_fills_up_a_round_is_as_it_was_read(ranks):
    assert ranks(taken_apart, 2, {}) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]
    assert ranks(zeroed, 2, {"split_batches": True}) == [[[0, 1], [4]], [[2, 3], [5]]]


def gathered():
    state = GradientState()
    loader = prepared(DataLoader(Stream(9), batch_size=2), gradient_state=state)
    return [x for batch in loader for x in gather_for_metrics(batch, gradient_state=state).tolist()]


def test_metrics_hold_each_sample_once(ranks):
    assert ranks(gathered, 2) == [list(range(9))] * 2


def skipped():
    loader = prepared(DataLoader(Stream(12), batch_size=2))
    return values(skip_first_batches(loader, 1)), values(loader), len(list(loader))


def test_skipping_counts_own_batches(ranks):
    assert ranks(skipped, 2) == [
        ([[4, 5], [8, 9]], [[0, 1], [4, 5], [8, 9]], 3),
        ([[6, 7], [10, 11]], [[2, 3], [6, 7], [10, 11]], 3),
    ]


def broken_off():
    loader = prepared(DataLoader(Stream(12), batch_size=2))
    next(iter(loader))
    return values(prepared(DataLoader(Stream(4), batch_size=2)))


def test_a_loop_that_was_left_disturbs_no_later_one(ranks):
    assert ranks(broken_off, 2) == [[[0, 1]], [[2, 3]]]


def out_of_step():
    state = PartialState(cpu=True)
    loader = prepared(DataLoader(Stream(12), batch_size=2))
    iterator = iter(loader)
    next(iterator)
    if state.process_index == 0:
        next(iterator)
        return None
    with pytest.raises(CollectiveMismatchError) as caught:
        next(iter(loader))  # begins anew, while rank 0 goes on
    return str(caught.value)


def test_ranks_that_iterate_apart_are_told(ranks):
    assert "is at step 0 of pass 2 here, but at step 1 of pass 1 on rank 0" in ranks(out_of_step, 2)[1]


def leaves_early():
    state = PartialState(cpu=True)
    loader = prepared(DataLoader(Stream(12), batch_size=2))
    iterator = iter(loader)
    next(iterator)
    if state.process_index == 0:
        torch.distributed.destroy_process_group()
        return None
    with pytest.raises(CollectiveMismatchError) as caught:
        list(iterator)
    return str(caught.value)


def test_a_reader_that_leaves_is_noticed(ranks):
    assert "waited for another rank to send a batch" in ranks(leaves_early, 2)[1]


def own_slices(split):
    def slice_fn(batch, where, process_index, num_processes):
        return (batch[where] + 100 * process_index, num_processes)

    loader = prepared(DataLoader(Stream(8), batch_size=4), split_batches=split, slice_fn_for_dispatch=slice_fn)
    return [(batch.tolist(), number) for batch, number in loader]


def test_a_slice_function_cuts(ranks):
    assert ranks(own_slices, 2, True) == [[([0, 1], 2), ([4, 5], 2)], [([102, 103], 2), ([106, 107], 2)]]
    assert ranks(own_slices, 2, False) == [[([0, 1, 2, 3], 2)], [([104, 105, 106, 107], 2)]]


def defaults():
    state = PartialState(cpu=True)
    stream, data = DataLoader(Stream(4)), DataLoader(torch.arange(4))
    kinds = [
        type(prepare_data_loader(stream, put_on_device=True)),
        type(prepare_data_loader(stream)),
        type(prepare_data_loader(data, put_on_device=True)),
    ]
    assert state.num_processes == 2
    return [kind.__name__ for kind in kinds]


def test_streams_are_dispatched_by_default_where_batches_are_placed(ranks):
    assert ranks(defaults, 2)[1] == ["DataLoaderDispatcher", "DataLoaderShard", "DataLoaderShard"]


# ---- on one process


def test_messages_carry_any_nesting():
    view = torch.arange(100).view(10, 10)[:, 3]
    batch = {"a": view, "b": [torch.zeros(0, 3), "text", torch.tensor(True)], "c": torch.randn(3).bfloat16()}
    message = encode(batch)
    assert message.numel() < 700
    back = decode(message)
    assert torch.equal(back["a"], view)
    assert (back["b"][0].shape, back["b"][1], back["b"][2].item()) == ((0, 3), "text", True)
    assert torch.equal(back["c"], batch["c"])
    assert decode(encode(torch.tensor([1 + 2j]))).tolist() == [1 + 2j]


def test_a_batch_without_tensors_cannot_be_cut():
    with pytest.raises(DataLoaderError, match="without tensors cannot be cut"):
        Cutter(2, splits=True, even=True).deal([["a", "b"]], True)


def test_the_fill_may_be_longer_than_what_was_read():
    parts = Cutter(5, splits=True, even=True).deal([torch.tensor([7, 8])], True).parts
    assert [part.batch.tolist() for part in parts] == [[7], [8], [7], [8], [7]]
    assert [part.real for part in parts] == [1, 1, 0, 0, 0]


# ---- failures before the first batch


class Deaf(IterableDataset):
    def set_epoch(self, epoch):
        if PartialState().process_index == 0:
            raise OSError("cannot change the epoch")

    def __iter__(self):
        return iter(range(8))


def failing_before_the_first_batch(kind):
    state = PartialState(cpu=True)
    weights = torch.ones(8) if state.process_index else -torch.ones(8)
    source = {
        "set_epoch": lambda: DataLoader(Deaf()),
        "weights": lambda: DataLoader(torch.arange(8), sampler=torch.utils.data.WeightedRandomSampler(weights, 8)),
    }[kind]()
    loader = prepared(source)
    said = []
    for _ in range(2):  # a rank that catches it may try again
        with pytest.raises((OSError, RuntimeError, DataLoaderError)) as caught:
            next(iter(loader))
        said.append((type(caught.value).__name__, str(caught.value)))
    torch.distributed.barrier()
    return said


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [("set_epoch", "OSError", "cannot change the epoch"), ("weights", "RuntimeError", "multinomial")],
)
def test_a_failure_before_the_first_batch_reaches_every_rank(ranks, kind, error, text):
    first, second = ranks(failing_before_the_first_batch, 2, kind)
    assert [name for name, _ in first + second] == [error, error, "DataLoaderError", "DataLoaderError"]
    assert all(text in said for _, said in first)
    assert all(f"Rank 0, which reads for all ranks, failed: {error}: " in said and text in said for _, said in second)


class Holed(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 5:
            raise OSError("no such block")
        return index


def failing_read():
    with pytest.raises((OSError, DataLoaderError)) as caught:
        values(prepared(DataLoader(Holed(), batch_size=2)))
    return "; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_a_failing_read_names_its_samples_on_every_rank(ranks):
    for said in ranks(failing_read, 2):
        assert said.endswith(
            "no such block; accel-data: this happened while reading batch 2 of the pass, samples [4, 5]"
        )
