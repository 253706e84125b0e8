"""Index feeds: what one rank reads in one pass over the data.

A feed knows the last batch before it is handed out, by arithmetic where the order is known, otherwise by reading one
round of indices (never of data) ahead. Iterating a feed again starts it again: torch's worker iterator asks twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .orders import Order
from .partition import Partition
from .permutation import SampleOrder

_NOTE = "accel-data:"
_BLOCK_ITEMS = 4096  # indices converted to Python integers at a time: amortises one tensor call over many batches


@dataclass(frozen=True)
class Tail:
    """The last batch of a pass.

    Args:
        size: samples in this rank's batch; an item that is no list of samples counts as one.
        real: how many of them are not padding.
        is_padded: whether any rank's last batch holds padding.
    """

    size: int
    real: int
    is_padded: bool


@dataclass(frozen=True)
class Ragged:
    """A pass that ends earlier on some ranks than on others.

    Args:
        common: batches that every rank gets.
        first_dry: the first rank that gets no more.
    """

    common: int
    first_dry: int


class Feed(Protocol):
    """This rank's batches of indices, and what is known about their end."""

    total: int | None  # batches of this pass; None until known, which is before the last one is yielded
    tail: Tail | None
    remainder: int
    ragged: Ragged | None  # known before the first batch that not every rank gets
    is_padding: bool  # whether the batch handed out now holds padding though others may follow

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches of indices; reads anew from the start of the pass each time."""
        ...

    def serve(self, batches: Iterator[Any]) -> Iterator[Any]:
        """What the user gets, given what torch's iterator yields; `total` is right when the last one comes."""
        ...


class KnownFeed:
    """The batches of one rank, cut from a known order by arithmetic: O(own batches), any start at no cost.

    Args:
        order: indices of the whole epoch.
        partition: which of them are this rank's.
        start: samples of the order that were consumed before this pass.
    """

    is_padding = False

    def __init__(self, order: Order, partition: Partition, start: int = 0) -> None:
        self._order = order
        self._partition = partition
        self._start = start
        remaining = len(order) - start
        self.total: int | None = partition.num_batches(remaining)
        self.remainder = partition.remainder(remaining)
        self.tail: Tail | None = None
        rounds, rest = divmod(max(remaining, 0), partition.round_size)
        first_dry = partition.first_dry(rest)
        self.ragged = None if first_dry is None else Ragged(rounds, first_dry)
        if self.total:
            real = partition.real_in_batch(remaining, self.total - 1)
            self.tail = Tail(
                size=partition.batch_size if partition.pads else real,
                real=real,
                is_padded=partition.pads and self.remainder > 0,
            )

    def __iter__(self) -> Iterator[list[int]]:
        full = min(max(len(self._order) - self._start, 0) // self._partition.round_size, self.total or 0)
        if isinstance(self._order, range):
            yield from self._full_rounds_of_range(full)
        elif isinstance(self._order, SampleOrder):
            yield from self._full_rounds_of_function(self._order, full)
        else:
            yield from self._full_rounds_of_tensor(self._order, full)
        for step in range(full, self.total or 0):
            yield self._last_batch(step)

    def serve(self, batches: Iterator[Any]) -> Iterator[Any]:
        """`batches`: the end is known by arithmetic."""
        return batches

    def samples(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Places in the order and indices of this rank's samples of the steps `first` to `last`, without padding."""
        part = self._partition
        begins = torch.arange(first, last).unsqueeze(1) * part.round_size + (self._start + part.begin(0))
        places = (begins + torch.arange(part.batch_size)).flatten()
        places = places[places < len(self._order)]
        order = self._order
        if isinstance(order, SampleOrder):
            return places, order.at(places)
        return places, places if isinstance(order, range) else order[places]

    def _full_rounds_of_range(self, full: int) -> Iterator[list[int]]:
        part = self._partition
        size, stride = part.batch_size, part.round_size
        begin = self._start + part.begin(0)
        for first in range(begin, begin + full * stride, stride):
            yield list(range(first, first + size))

    def _full_rounds_of_function(self, order: SampleOrder, full: int) -> Iterator[list[int]]:
        part = self._partition
        within = torch.arange(part.batch_size)
        first, block = 0, 1  # blocks grow from one batch, so that the first one comes at once
        while first < full:
            steps = torch.arange(first, min(first + block, full)).unsqueeze(1)
            yield from order.at(steps * part.round_size + (self._start + part.begin(0)) + within).tolist()
            first, block = first + block, min(8 * block, max(1, _BLOCK_ITEMS // part.batch_size))

    def _full_rounds_of_tensor(self, order: Tensor, full: int) -> Iterator[list[int]]:
        part = self._partition
        rounds = order[self._start : self._start + full * part.round_size].view(full, part.world_size, part.batch_size)
        own = rounds[:, part.rank]
        block = max(1, _BLOCK_ITEMS // part.batch_size)
        for first in range(0, full, block):
            yield from own[first : first + block].tolist()

    def _last_batch(self, step: int) -> list[int]:
        order, length = self._order, len(self._order)
        first = self._start + self._partition.begin(step)
        last = first + self._partition.batch_size
        if not self._partition.pads:
            last = min(last, length)
        return [int(order[index % length]) for index in range(first, last)]


NOTHING = object()
"""The items of a portion of a rank that gets none in a round in which others do."""


@dataclass(frozen=True)
class Portion:
    """One rank's part of one round.

    Args:
        items: its batch.
        tail: how much of it is real.
        remainder: the round's real samples if it is short.
        first_dry: the first rank that gets nothing in this round, if any.
    """

    items: Any
    tail: Tail
    remainder: int
    first_dry: int | None = None


class ReadFeed:
    """A feed over something that can only be iterated; it reads one portion ahead.

    Args:
        portions: starts reading this rank's portions from the beginning of the pass.
    """

    is_padding = False

    def __init__(self, portions: Callable[[], Iterator[Portion]]) -> None:
        self._portions = portions
        self.total: int | None = None
        self.tail: Tail | None = None
        self.remainder = 0
        self.ragged: Ragged | None = None

    def __iter__(self) -> Iterator[Any]:
        self.total = self.tail = self.ragged = None
        portions = self._portions()
        served, portion = 0, self._note_ragged(next(portions, None), 0)
        while portion is not None and portion.items is not NOTHING:
            served += 1
            following = self._note_ragged(next(portions, None), served)
            if following is None or following.items is NOTHING:
                self.total, self.tail, self.remainder = served, portion.tail, portion.remainder
            yield portion.items
            portion = following
        self.total = served

    def _note_ragged(self, portion: Portion | None, served: int) -> Portion | None:
        if portion is not None and portion.first_dry is not None:
            self.ragged = Ragged(served, portion.first_dry)
        return portion

    def serve(self, batches: Iterator[Any]) -> Iterator[Any]:
        """`batches`: the end is known from the indices."""
        return batches


def name_samples(error: Exception, feed: Feed, step: int) -> None:
    """Say in a note which samples were being read when a data set failed."""
    if any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        return
    said = f"{_NOTE} this happened while reading batch {step} of the pass"
    if isinstance(feed, KnownFeed):
        said += f", samples {feed.samples(step, step + 1)[1].tolist()}"
    error.add_note(said)
