"""What the rank that reads hands out in one step: a round of batches, one part per rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from accel_state import concatenate, ignorant_find_batch_size, slice_tensors
from accel_state.errors import DataLoaderError

from .feeds import Feed


@dataclass(frozen=True)
class Part:
    """One rank's part of a round: a batch, its samples, and how many of them are not padding."""

    batch: Any
    size: int
    real: int


@dataclass(frozen=True)
class Round:
    """One step of all ranks; a part is None where a rank's data has ended."""

    parts: list[Part | None]
    is_last: bool
    remainder: int = -1
    is_padded: bool = False

    @property
    def first_dry(self) -> int:
        """The first part without a batch, though others have one; 0 if there is none."""
        return self.parts.index(None) if None in self.parts else 0


def rounds_of(
    batches: Iterator[Any], feed: Feed, per_round: int, drops_short: bool
) -> Iterator[tuple[list[Any], bool]]:
    """Batches in rounds, each with whether it is the last one. No batch is read ahead of need: a full round is only
    held back where the length is unknown and a short round after it would be dropped.

    Args:
        batches: what `feed` serves; its `total` is known when the last batch comes.
        per_round: batches of a full round.
        drops_short: leave out a last round that is not full.
    """
    held: list[Any] | None = None
    group: list[Any] = []
    for read, batch in enumerate(batches, start=1):
        group.append(batch)
        left = None if feed.total is None else feed.total - read
        if len(group) < per_round:
            if left == 0 and not drops_short:
                yield group, True
            continue
        if held is not None:
            yield held, False
            held = None
        if left is None and drops_short:
            held = group
        else:
            is_last = left == 0 or (drops_short and left is not None and left < per_round)
            yield group, is_last
            if is_last:
                return
        group = []
    if held is not None:
        yield held, True


@dataclass
class Cutter:
    """Makes parts of rounds.

    Args:
        num_parts: as many as ranks with data of their own.
        splits: a round is one batch that is cut, rather than one batch per part.
        even: complete a last round that is short with the first samples or batches.
        slice_fn: cuts a batch; torch's slicing of nested tensors by default.
        reader_part: the part that the loop in this process gets, and may change in place.
    """

    num_parts: int
    splits: bool
    even: bool
    slice_fn: Callable[..., Any] | None = None
    reader_part: int | None = None
    _opening: list[Any] = field(default_factory=list)

    def nothing(self) -> Round:
        """The round that ends a pass without data."""
        return Round([None] * self.num_parts, is_last=True)

    def deal(self, group: Sequence[Any], is_last: bool) -> Round:
        """The parts of a round of batches."""
        wanted = 1 if self.splits else self.num_parts
        self._keep(group[: wanted - len(self._opening)])
        if self.splits or self.slice_fn is not None:
            return self._cut(group, is_last)
        sizes = [_size(batch) for batch in group]
        parts: list[Part | None] = [Part(batch, size, size) for batch, size in zip(group, sizes, strict=True)]
        missing = self.num_parts - len(parts)
        if self.even:
            parts += [Part(batch, _size(batch), 0) for batch in islice(cycle(self._opening), missing)]
        else:
            parts += [None] * missing
        is_short = missing > 0 or sizes[-1] < _size(self._opening[0])
        return Round(parts, is_last, sum(sizes) if is_short else 0, is_padded=missing > 0 and self.even)

    def _keep(self, group: Sequence[Any]) -> None:
        """Keep the first round for filling up the last one; of what the loop gets too, a copy of our own."""
        for batch in group:
            is_shared = self.splits or self.slice_fn is not None or len(self._opening) == self.reader_part
            self._opening.append(_copied(batch) if self.even and is_shared else batch)

    def _cut(self, group: Sequence[Any], is_last: bool) -> Round:
        """One batch, or a joined round, cut into equal parts."""
        data = group[0] if len(group) == 1 else concatenate(group)
        length = ignorant_find_batch_size(data)
        if length is None:
            raise DataLoaderError(
                f"A batch of type {type(data).__name__} without tensors cannot be cut for the ranks. Use "
                "split_batches=False, which hands out whole batches."
            )
        size = self._part_size(length)
        if self.even and length < size * self.num_parts:
            data = self._filled(data, size * self.num_parts - length)
        parts: list[Part | None] = []
        for index in range(self.num_parts):
            real = min(max(length - index * size, 0), size)
            own = size if self.even else real
            parts.append(Part(self._slice(data, index * size, own, index), own, real) if own else None)
        is_short = length < self._full_length()
        return Round(parts, is_last, length if is_short else 0, is_padded=self.even and length < size * self.num_parts)

    def _part_size(self, length: int) -> int:
        return -(-length // self.num_parts)

    def _full_length(self) -> int:
        return sum(_size(batch) for batch in self._opening)

    def _filled(self, data: Any, missing: int) -> Any:
        """`data` with its first round's first samples at the end."""
        opening = self._opening[0] if len(self._opening) == 1 else concatenate(self._opening)
        length = _size(opening)
        fill = [slice_tensors(opening, slice(0, min(length, missing - at))) for at in range(0, missing, length)]
        return concatenate([data, *fill])

    def _slice(self, data: Any, begin: int, size: int, index: int) -> Any:
        cut = slice(begin, begin + size)
        if self.slice_fn is not None:
            return self.slice_fn(data, cut, process_index=index, num_processes=self.num_parts)
        return slice_tensors(data, cut)


def _copied(batch: Any) -> Any:
    try:
        return copy.deepcopy(batch)
    except TypeError:  # what cannot be copied cannot be sent either, which says so
        return batch


def _size(batch: Any) -> int:
    """Samples of a batch: of its first tensor, else its length as a list; anything else counts as one."""
    size = ignorant_find_batch_size(batch)
    if size is not None:
        return size
    return len(batch) if isinstance(batch, list | tuple) else 1
