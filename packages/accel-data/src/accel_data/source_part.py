"""What a loader needs to know of a data set in shards; the counterpart of `BatchSamplerShard`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from accel_state import ignorant_find_batch_size
from accel_state.errors import DataLoaderError

from .agreement import WINDOW, Agreement, Window
from .feeds import Ragged, Tail
from .reading import drop_items
from .sources import ShardedStream, advanced


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

    def open(self, start: int = 0, positions: tuple[int, ...] | None = None) -> SourceFeed:
        """This rank's batches after `start` of them, or from the shards' positions."""
        at = (0,) * self.num_shards if positions is None else positions
        dropped = 0 if positions is not None else start
        as_samples = 0 if self.has_workers else dropped * (self.batch_size or 1)
        self.dataset.start_at(at, as_samples)
        if self._agreement is None:
            self._agreement = Agreement(self.num_processes, self.process_index, self.num_shards)
        return SourceFeed(self.dataset, at, self._agreement, self.repeats, dropped if self.has_workers else 0)

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

    Args:
        stream: what torch's iterator reads.
        positions: of all shards, at the start.
        agreement: with the other ranks.
        repeats: see `SourcePart`.
        num_dropped: batches to read and drop first.
    """

    def __init__(
        self,
        stream: ShardedStream,
        positions: tuple[int, ...],
        agreement: Agreement,
        repeats: bool,
        num_dropped: int,
    ) -> None:
        self.positions = positions
        self._own_positions = positions
        self._stream = stream
        self._agreement = agreement
        self._repeats = repeats
        self._num_dropped = num_dropped
        self._opening: list[Any] = []  # what a rank that ended first repeats
        self.total: int | None = None
        self.tail: Tail | None = None
        self.is_padding = False
        self.remainder = -1
        self.ragged: Ragged | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)

    def serve(self, batches: Iterator[Any]) -> Iterator[Any]:
        """`batches`, without their marks, in windows on which the ranks agree."""
        batches = self._telling_of_failure(batches)
        drop_items(batches, self._num_dropped)
        served, repeated = 0, 0
        found = list(islice(batches, WINDOW))
        window = self._propose(found).result()
        while steps := self._num_steps(window):
            if not self._opening:
                self._opening = [batch for batch, _ in found]
                self._check_opening(window)
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
                batch = self._opening[repeated % len(self._opening)] if self.is_padding else found[step][0]
                repeated += self.is_padding
                is_last = step == steps - 1 and (after is None or not self._num_steps(after))
                self._note(batch, window, is_last, served)
                self.positions = window.positions[step]
                yield batch
            if after is None:
                return
            found, window = following, after

    def _telling_of_failure(self, batches: Iterator[Any]) -> Iterator[Any]:
        """`batches`; where reading them fails, the other ranks hear of it instead of waiting for a window."""
        try:
            yield from batches
        except Exception:
            self._agreement.give_up()
            raise

    def _propose(self, found: list[Any]) -> Any:
        rows = []
        for _, marks in found:
            self._own_positions = advanced(self._own_positions, marks)
            rows.append(self._own_positions)
        rows += [self._own_positions] * (WINDOW - len(rows))
        return self._agreement.propose(len(found), rows, self._stream.shards_of(0, 1))

    def _num_steps(self, window: Window) -> int:
        return max(window.counts) if self._repeats else min(window.counts)

    def _check_opening(self, window: Window) -> None:
        """The same on every rank: one without a single batch has nothing to repeat."""
        empty = [rank for rank, count in enumerate(window.counts) if count == 0]
        if empty:
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
