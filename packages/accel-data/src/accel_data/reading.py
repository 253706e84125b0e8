"""Cutting index streams that can only be iterated: unknown samplers, unknown batch samplers, single items.

Every rank reads all indices and keeps its own; data is only fetched for those. Nothing is assumed about the items.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from .feeds import NOTHING, Portion, Tail
from .partition import Partition


def sample_portions(sampler: Iterable[Any], partition: Partition, start: int) -> Iterator[Portion]:
    """This rank's batches of the samples that a sampler yields, after the first `start` of them."""
    samples = iter(sampler)
    opening = list(islice(samples, min(start, partition.round_size)))
    drop_items(samples, start - len(opening))
    first = partition.begin(0)
    while read := list(islice(samples, partition.round_size)):
        opening += read[: partition.round_size - len(opening)]
        real, remainder = partition.real_in_batch(len(read), 0), partition.remainder(len(read))
        if remainder < 0:  # a short round that is dropped
            return
        if partition.pads:
            read += islice(cycle(opening), partition.round_size - len(read))
        own = read[first : first + partition.batch_size]
        tail = Tail(len(own), real, partition.pads and remainder > 0)
        yield Portion(own or NOTHING, tail, remainder, partition.first_dry(remainder))


@dataclass(frozen=True, kw_only=True)
class BatchDeal:
    """How batches of an unknown batch sampler, or single items, are dealt to ranks.

    Args:
        world_size, rank: as in `Partition`.
        batch_size: what the batch sampler says a full batch is, None if it does not say; under `split_batches` the
            size before splitting.
        drop_last: leave out a last round that is short.
        even_batches: complete a short round with the first batches.
        split_batches: every rank gets a part of each batch, instead of a batch of its own.
        are_lists: whether an item is a list of samples, rather than one index.
    """

    world_size: int
    rank: int
    batch_size: int | None
    drop_last: bool
    even_batches: bool
    split_batches: bool
    are_lists: bool = True

    @property
    def batches_per_round(self) -> int:
        """Batches of the batch sampler that all ranks together take in one step."""
        return 1 if self.split_batches else self.world_size


def batch_portions(batches: Iterable[Any], deal: BatchDeal, start: int) -> Iterator[Portion]:
    """This rank's batches of those that a batch sampler yields, after the first `start` of them."""
    stream = iter(batches)
    opening: list[Any] = []
    taken = 0
    while taken < start and (read := _read_round(stream, deal, start - taken)):
        opening += read[: deal.world_size - len(opening)]
        taken += deal.batches_per_round
    read = _read_round(stream, deal)
    while read:
        opening += read[: deal.world_size - len(opening)]
        following = _read_round(stream, deal)
        yield from _portion(read, opening, deal, is_last=not following)
        read = following


def _read_round(stream: Iterator[Any], deal: BatchDeal, limit: int | None = None) -> list[Any]:
    """The batches of the next round, one per rank; fewer at the end."""
    if not deal.split_batches:
        return list(islice(stream, deal.world_size if limit is None else min(limit, deal.world_size)))
    batch = next(stream, None)
    if batch is None:
        return []
    size = (deal.batch_size or len(batch)) // deal.world_size
    parts = [batch[rank * size : (rank + 1) * size] for rank in range(deal.world_size)]
    return [part for part in parts if part]


def _portion(read: list[Any], opening: list[Any], deal: BatchDeal, *, is_last: bool) -> Iterator[Portion]:
    """This rank's portion of a round, if the round is served."""
    sizes = [len(batch) for batch in read] if deal.are_lists else [1] * len(read)
    full_size = _own_batch_size(deal)
    missing = deal.world_size - len(read)
    short = missing > 0 or (is_last and full_size is not None and sizes[-1] < full_size)
    remainder = 0
    if short and deal.world_size > 1:
        if deal.drop_last:
            return
        remainder = sum(sizes)
        if deal.even_batches:
            read = _completed(read, opening, deal)
    first_dry = len(read) if len(read) < deal.world_size else None
    if deal.rank >= len(read):
        yield Portion(NOTHING, Tail(0, 0, False), remainder, first_dry)
        return
    own = read[deal.rank]
    real = sizes[deal.rank] if deal.rank < len(sizes) else 0
    tail = Tail(len(own) if deal.are_lists else 1, real, remainder > 0 and deal.even_batches)
    yield Portion(own, tail, remainder, first_dry)


def _own_batch_size(deal: BatchDeal) -> int | None:
    if deal.batch_size is None or not deal.are_lists:
        return None
    return deal.batch_size // deal.world_size if deal.split_batches else deal.batch_size


def _completed(read: list[Any], opening: list[Any], deal: BatchDeal) -> list[Any]:
    """A short round made full: sample by sample where batches have one size, else by whole batches."""
    size = _own_batch_size(deal)
    regular = size is not None and all(len(batch) == size for batch in (*opening[:-1], *read[:-1]))
    if not regular or size is None:
        return [*read, *islice(cycle(opening), deal.world_size - len(read))]
    samples = [sample for batch in read for sample in batch]
    first_samples = [sample for batch in opening for sample in batch]
    samples += islice(cycle(first_samples), size * deal.world_size - len(samples))
    return [samples[i : i + size] for i in range(0, size * deal.world_size, size)]


def drop_items(items: Iterator[Any], count: int) -> None:
    """Read `count` items and forget them."""
    next(islice(items, max(count, 0), max(count, 0)), None)
