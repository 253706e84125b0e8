"""What a loader needs to know of a data set in shards; the counterpart of `BatchSamplerShard`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from accel_state import ignorant_find_batch_size
from accel_state.errors import DataLoaderError

from .agreement import NOTHING_AT_ALL, WINDOW, Agreement, Proposal, Window
from .feeds import Ragged, Tail
from .reading import drop_items
from .shard_places import ShardPlaces
from .sources import ShardedStream, TaggedCollate, advanced


class SourcePart:
    """One rank's shards of a data set, and how ranks end together.

    Args:
        stream: this rank's shards.
        batch_size: samples of a batch; None where the data set makes batches itself.
        repeats: a rank whose shards end first repeats its first batches until all have ended; False: all stop with the
            first one.
        has_workers: whether samples to skip are dropped as batches, after they were collated.
    """

    counts_samples = False
    num_units = None
    units_per_step = 1

    def __init__(self, stream: ShardedStream, batch_size: int | None, *, repeats: bool, has_workers: bool) -> None:
        self.dataset = stream
        self.batch_size = batch_size
        self.repeats = repeats
        self.has_workers = has_workers
        self.num_processes, self.process_index = stream.num_processes, stream.process_index
        self.generator: torch.Generator | None = getattr(stream.dataset, "generator", None)
        self.armed: Any = None
        self._agreement: Agreement | None = None

    @property
    def num_shards(self) -> int:
        """Shards of the whole data set."""
        return self.dataset.num_shards

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all ranks together take in one step."""
        return None if self.batch_size is None else self.batch_size * self.num_processes

    @property
    def knows_all(self) -> bool:
        """Whether a position holds the shards of all ranks: they have agreed on it, or there is only one."""
        return self.num_processes == 1 or self._agreed().is_shared

    def open(self, start: int = 0, places: ShardPlaces | None = None) -> SourceFeed:
        """This rank's batches after `start` of them, or from places in the shards."""
        begin = ShardPlaces.start(self.num_shards) if places is None else places
        dropped = 0 if places is not None else start
        as_samples = 0 if self.has_workers else dropped * (self.batch_size or 1)
        self.dataset.start_at(begin, as_samples)
        return SourceFeed(self.dataset, begin, self._agreed(), self.repeats, dropped if self.has_workers else 0)

    def collating(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The user's function, which gets samples without their tags."""
        return TaggedCollate(collate)

    def _agreed(self) -> Agreement:
        if self._agreement is None:
            self._agreement = Agreement(self.dataset.part_of_rank, self.process_index, self.num_shards)
        return self._agreement

    def finish(self) -> None:
        """Nothing: reading the shards has drawn what they draw."""

    def pass_over(self) -> None:
        """Nothing: the next epoch begins at the shards' starts."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_agreement": None}

    def __len__(self) -> int:
        raise TypeError("The length of a stream read in shards is only known once it was read.")


class SourceFeed:
    """The batches of one rank's shards, as many on every rank.

    A rank whose shards have ended while others have data repeats its first batches. They are read again, by torch's
    iterator: kept ones would be those that the loop has changed since, and would take memory from the start.

    Args:
        stream: what torch's iterator reads.
        places: in all shards, at the start.
        agreement: with the other ranks.
        repeats: see `SourcePart`.
        num_dropped: batches to read and drop first.

    Attributes:
        read_again: torch's iterator anew; set by whoever serves the feed.
    """

    def __init__(
        self,
        stream: ShardedStream,
        places: ShardPlaces,
        agreement: Agreement,
        repeats: bool,
        num_dropped: int,
    ) -> None:
        self.places = places
        self.read_again: Callable[[], Iterator[Any]] | None = None
        self._own_codes = places.codes
        self._shards = stream.shards_of(0, 1)
        self._stream = stream
        self._agreement = agreement
        self._repeats = repeats
        self._num_dropped = num_dropped
        self.total: int | None = None
        self.tail: Tail | None = None
        self.is_padding = False
        self.remainder = -1
        self.ragged: Ragged | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)

    def serve(self, batches: Iterator[Any]) -> Iterator[Any]:
        """`batches`, without their marks, in windows on which the ranks agree."""
        self._agreement.begin()
        batches = self._telling_of_failure(batches)
        drop_items(batches, self._num_dropped)
        served, repeated = 0, self._repeated()
        found = list(islice(batches, WINDOW))
        window = self._propose(found, is_first=True).result()
        if self._repeats:
            self._check_that_all_have_something(window)
        while steps := self._num_steps(window):
            following: list[Any] = []
            pending, after = None, None
            for step in range(steps):
                if steps == WINDOW:
                    wanted = WINDOW if step >= steps - 2 else (step + 1) * WINDOW // (steps - 1)
                    following += islice(batches, wanted - len(following))
                    if step == steps - 2:
                        pending = self._propose(following)
                    elif step == steps - 1:
                        after = pending.result() if pending is not None else None
                served += 1
                self.is_padding = step >= len(found)
                batch = next(repeated) if self.is_padding else found[step][0]
                is_last = step == steps - 1 and (after is None or not self._num_steps(after))
                self._note(batch, window, is_last, served)
                self.places = self.places.moved_to(window.codes[step])
                yield batch
            if after is None:
                return
            found, window = following, after

    def __getstate__(self) -> dict[str, Any]:
        return {"places": self.places}  # the rest belongs to the run

    def _telling_of_failure(self, batches: Iterator[Any]) -> Iterator[Any]:
        """`batches`; where reading them fails, the other ranks hear of it instead of waiting for a window."""
        try:
            yield from batches
        except Exception:
            self._agreement.give_up()
            raise

    def _repeated(self) -> Iterator[Any]:
        """This rank's batches from the start of its shards, over and over."""
        assert self.read_again is not None
        while True:
            self._stream.start_at(ShardPlaces.start(len(self.places.codes)).dealt_as(self.places), 0)
            for batch, _ in self.read_again():
                yield batch

    def _propose(self, found: list[Any], *, is_first: bool = False) -> Proposal:
        rows = []
        for _, marks in found:
            self._own_codes = advanced(self._own_codes, marks)
            rows.append(self._own_codes)
        rows += [self._own_codes] * (WINDOW - len(rows))
        was_empty = is_first and not found and not any(self._own_codes[shard] for shard in self._shards)
        return self._agreement.propose(NOTHING_AT_ALL if was_empty else len(found), rows, self._shards)

    def _num_steps(self, window: Window) -> int:
        return max(0, max(window.counts) if self._repeats else min(window.counts))

    def _check_that_all_have_something(self, window: Window) -> None:
        """The same on every rank: one without a single batch has nothing to repeat."""
        empty = [part for part, count in enumerate(window.counts) if count == NOTHING_AT_ALL]
        if empty and max(window.counts) > 0:
            raise DataLoaderError(
                f"The shards of rank {', '.join(map(str, empty))} hold no batch, so there is nothing to repeat there "
                "while other ranks have data. Use more even shards, fewer ranks, or even_batches=False, which stops "
                "with the first rank that ends."
            )

    def _note(self, batch: Any, window: Window, is_last: bool, served: int) -> None:
        """What is known of a batch when it is handed out."""
        size = ignorant_find_batch_size(batch) or 1
        if is_last:
            self.total, self.remainder = served, 0
        is_uneven = min(window.counts) != max(window.counts)
        self.tail = Tail(size, 0 if self.is_padding else size, is_padded=is_uneven and self._repeats)
