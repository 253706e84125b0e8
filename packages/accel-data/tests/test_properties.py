"""Any length, batch size, world, workers, dropping, splitting and save point: each sample once, in order."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from accel_data import PermutationSampler, SampleDigest, prepare_data_loader

KINDS = ["sequential", "shuffle", "seedable", "permutation", "own batches"]


def group_of(kind, length, batch_size, world, workers, drop_last, how):
    """The loaders of all ranks, in one process."""
    data = torch.arange(length)
    group = []
    for rank in range(world):
        torch.manual_seed(5)
        if kind == "own batches":
            sampler = RandomSampler(data, generator=torch.Generator().manual_seed(5))
            source = DataLoader(data, batch_sampler=BatchSampler(sampler, batch_size, drop_last), num_workers=workers)
        else:
            sampler = {"permutation": PermutationSampler(length, seed=5), "sequential": SequentialSampler(data)}.get(
                kind
            )
            source = DataLoader(
                data,
                batch_size=batch_size,
                shuffle=None if sampler is not None else True,
                sampler=sampler,
                drop_last=drop_last,
                num_workers=workers,
            )
        group.append(
            prepare_data_loader(
                source, num_processes=world, process_index=rank, use_seedable_sampler=kind == "seedable", **how
            )
        )
    return group


def dealt(group, limit=None):
    """What all ranks get round by round, in the order's order, without padding."""
    parts = []
    for loader in group:
        part = []
        for step, batch in enumerate(loader):
            is_last = loader.end_of_dataloader
            part.append(batch.tolist()[: loader.tail.real if is_last else None])
            if step + 1 == limit:
                break
        parts.append(part)
    rounds = max(map(len, parts))
    return [item for step in range(rounds) for part in parts if step < len(part) for item in part[step]]


@given(
    kind=st.sampled_from(KINDS),
    length=st.integers(1, 60),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    workers=st.tuples(*[st.sampled_from([0, 0, 0, 0, 0, 0, 0, 2])] * 2),
    even=st.booleans(),
    split=st.booleans(),
    drop_last=st.booleans(),
    stop=st.integers(0, 8),
)
@settings(max_examples=120, deadline=None)
def test_what_was_read_and_what_is_left_are_the_epoch(
    kind, length, sizes, worlds, workers, even, split, drop_last, stop
):
    def group(at, workers=0):
        batch_size = sizes[at] * (worlds[at] if split else 1)
        how = {"even_batches": even, "split_batches": split}
        return group_of(kind, length, batch_size, worlds[at], workers, drop_last, how)

    (alone,) = group_of(kind, length, 1, 1, 0, False, {})
    orders = [[item for batch in alone for item in batch.tolist()] for _ in range(2)]
    assert sorted(orders[0]) == list(range(length))

    whole = group(0)
    first_epoch = dealt(whole)
    round_size = sizes[0] * worlds[0]
    kept = length // round_size * round_size if drop_last else length
    assert first_epoch == orders[0][:kept]
    assert dealt(whole)[: len(first_epoch)] == orders[1][:kept]

    stopped = group(0, workers[0])
    read = dealt(stopped, stop) if stop else []
    resumed = group(1, workers[1])
    for loader in resumed:
        loader.load_state_dict(stopped[0].state_dict())
    next_round = sizes[1] * worlds[1]
    if stopped[0].iteration == 0:  # not read to its end
        rest = dealt(resumed)
        left = length - len(read)
        assert read + rest == orders[0][: len(read) + (left // next_round * next_round if drop_last else left)]
        digest = sum((loader.fingerprint() for loader in stopped + resumed), SampleDigest())
        assert digest.num_samples == len(read + rest)
    assert dealt(resumed) == orders[1][: length // next_round * next_round if drop_last else length]
