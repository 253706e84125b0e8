"""One rank's part of an iterable data set: every rank reads the stream and keeps its own samples.

Ranks have to read the same stream in the same order; a `generator` or `set_epoch` of the data set is kept in step.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .feeds import NOTHING, Portion, Ragged, Tail
from .partition import Partition, check_rank
from .reading import drop_items, sample_portions
from .worker_stream import MarkingCollate, StreamEnd, WorkerStreamFeed, skipping_orders


class IterableDatasetShard(IterableDataset):
    """The samples of one rank, batch by batch, so that all ranks together see the stream.

    Args:
        dataset: any iterable. One with `skip(n)` is asked to start later, one with `state_dict` and `load_state_dict`
            is put back, and any other is read and dropped up to where it continues.
        batch_size: samples of a batch, before splitting.
        drop_last: leave out a last round that is short; otherwise `even_batches` decides.
        num_processes: ranks that read the stream.
        process_index: this rank.
        split_batches: every rank gets a part of each batch.
        even_batches: complete a short last round, so that all ranks get as many batches.

    Raises:
        DataLoaderError: a rank out of range, or a batch size that cannot be split.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        *,
        even_batches: bool = True,
    ) -> None:
        check_rank(process_index, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.partition = Partition.of_batches(
            batch_size,
            num_processes,
            process_index,
            split_batches=split_batches,
            drop_last=drop_last,
            even_batches=even_batches,
        )
        self.start = 0  # samples of the stream that were consumed before the next iteration
        self.source_state: Any = None  # of the data set, to be put back before the next iteration
        self.last_portion: Portion | None = None  # the one handed out last, where it is read in this process
        self.first_dry: int | None = None  # the first rank that got nothing in the round read last, if any
        self.notes_end = self.has_ended = False  # whether, and whether just now, the data set was read to its end
        self.tells_end = False  # whether the last thing yielded is a `StreamEnd`, for a `MarkingCollate`

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set inside, if it listens."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        self.last_portion = self.first_dry = None
        source, start = self.dataset, self.start
        if self.source_state is not None:
            source.load_state_dict(self.source_state)
            start = 0
        if self.notes_end:
            source = self._noting_end(source)
        if start and callable(getattr(source, "skip", None)):
            source, start = source.skip(start), 0
        if self.num_processes == 1:
            samples = iter(source)
            drop_items(samples, start)
            yield from samples
        portion = None
        portions = sample_portions(source, self.partition, start) if self.num_processes > 1 else ()
        for portion in portions:
            self.first_dry = portion.first_dry
            if portion.items is not NOTHING:
                self.last_portion = portion
                yield from portion.items
        if self.tells_end and get_worker_info() is not None:
            yield StreamEnd.after(portion)

    def _noting_end(self, samples: Iterable[Any]) -> Iterator[Any]:
        self.has_ended = False
        yield from samples
        self.has_ended = True

    def __len__(self) -> int:
        """Samples of this rank, where the data set has a length."""
        if self.num_processes == 1:
            return len(self.dataset)
        return self.partition.num_batches(len(self.dataset)) * self.partition.batch_size

    @property
    def total_length(self) -> int:
        """Samples of the whole stream, where it has a length."""
        return len(self.dataset)


class StreamFeed:
    """The batches of a stream; the last one is known by fetching one batch ahead.

    Args:
        shard: the data set that torch's iterator reads.
        num_dropped: batches to read and drop first.
        keeps_state: whether the data set tells its state, which is then noted for each batch.
    """

    is_padding = False

    def __init__(self, shard: IterableDatasetShard, num_dropped: int, keeps_state: bool = False) -> None:
        self._shard = shard
        self._keeps_state = keeps_state
        self.source_state: Any = shard.source_state  # of the data set after the batch handed out last
        self._num_dropped = num_dropped
        self.total: int | None = None
        self.tail: Tail | None = None
        self.remainder = -1
        self.ragged: Ragged | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shard)

    def serve(self, batches: Iterator[Any]) -> Iterator[Any]:
        """`batches`, each handed out once it is known whether another follows."""
        drop_items(batches, self._num_dropped)
        served = 0
        missing = object()
        batch = next(batches, missing)
        self._note_ragged(served)
        while batch is not missing:
            state = self._state()
            failure = None
            try:
                following = next(batches, missing)
            except Exception as error:  # noqa: BLE001  (raised below, when its turn comes)
                following, failure = missing, error
            served, self.source_state = served + 1, state
            self._note_ragged(served)
            if following is missing and failure is None:
                self._end(served)
            yield batch
            if failure is not None:
                raise failure
            batch = following
        self.total = served

    def _state(self) -> Any:
        """That of the data set; None at its end, from where one that keeps its place begins anew."""
        if not self._keeps_state or self._shard.has_ended:
            return None
        return copy.deepcopy(self._shard.dataset.state_dict())

    def _note_ragged(self, served: int) -> None:
        """Note that the round fetched last, which follows `served` batches, has nothing for some rank."""
        if self.ragged is None and self._shard.first_dry is not None:
            self.ragged = Ragged(served, self._shard.first_dry)

    def _end(self, served: int) -> None:
        self.total = served
        last = self._shard.last_portion
        if last is not None:
            self.tail, self.remainder = last.tail, last.remainder


class StreamPart:
    """What a loader needs to know of a stream; the counterpart of `BatchSamplerShard`.

    Without workers a position counts samples of the stream, so it fits any number of ranks. With workers each has a
    stream of its own, a position counts batches, and only fits as many ranks and workers.
    """

    def __init__(self, loader: DataLoader) -> None:
        dataset = loader.dataset
        self.dataset: IterableDatasetShard = (
            dataset
            if isinstance(dataset, IterableDatasetShard)
            else IterableDatasetShard(dataset, loader.batch_size or 1, loader.drop_last)
        )
        self.batch_size: int | None = None if loader.batch_size is None else self.dataset.batch_size
        self.drop_last = self.dataset.drop_last
        self.num_processes, self.process_index = self.dataset.num_processes, self.dataset.process_index
        self.generator = getattr(self.dataset.dataset, "generator", None)
        self.num_workers = loader.num_workers
        self.dataset.tells_end = self.has_workers
        self._orders = skipping_orders() if self.has_workers else None
        self.armed: Any = None
        self._first_state: Any = None  # of a data set that tells its state: as it was before its first pass
        self._is_under_way = False  # whether such a data set was left within a pass

    @property
    def has_workers(self) -> bool:
        """Whether the stream is read in other processes, by each one of its own."""
        return self.num_workers > 0

    @property
    def counts_samples(self) -> bool:
        """Whether a position counts samples, rather than batches per rank."""
        return not self.has_workers

    @property
    def num_units(self) -> int | None:
        """None: a stream's length is only known once it was read."""
        return None

    @property
    def units_per_step(self) -> int:
        """Samples that all ranks together consume in one step, or 1 batch per rank."""
        return self.dataset.partition.round_size if self.counts_samples else 1

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all ranks together take in one step."""
        return None if self.batch_size is None else self.dataset.partition.round_size

    def open(self, start: int = 0, source_state: Any = None) -> StreamFeed | WorkerStreamFeed:
        """The batches after the first `start` units, or from a state of the data set."""
        self.dataset.start = start if self.counts_samples else 0
        self.dataset.source_state = source_state
        if self._keeps_state:
            self.dataset.notes_end = self._is_under_way = True
            if self._first_state is None:
                self._first_state = copy.deepcopy(self.dataset.dataset.state_dict())
        if self._orders is not None:
            pads = self.dataset.partition.pads
            # workers are read in turn, so each has served at least its part of them, or all that it has
            self._orders += torch.tensor([1, start // self.num_workers - int(self._orders[1])])
            return WorkerStreamFeed(self.dataset, self.num_workers, self.process_index, pads=pads, num_dropped=start)
        return StreamFeed(self.dataset, 0 if self.counts_samples else start, self._keeps_state)

    def collating(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """What makes batches of samples on their way: the user's function, with marks where workers call it."""
        if self._orders is None:
            return collate
        return MarkingCollate(collate, self.batch_size if self.drop_last else None, self._orders)

    @property
    def _keeps_state(self) -> bool:
        """Whether the data set's own state is used: it has one, no quicker `skip`, and is read in this process."""
        source = self.dataset.dataset
        names = ("state_dict", "load_state_dict")
        has_state = all(callable(getattr(source, name, None)) for name in names)
        return has_state and not self.has_workers and not callable(getattr(source, "skip", None))

    def rewind(self) -> None:
        """Put a data set that keeps its place back to its start, if the pass before was left."""
        if self._is_under_way:
            self.dataset.dataset.load_state_dict(copy.deepcopy(self._first_state))
            self._is_under_way = False

    def finish(self) -> None:
        """Reading the stream to its end has drawn what it draws."""
        self._is_under_way = False

    def pass_over(self) -> None:
        """Read the stream to its end, so that its generator stands where the next epoch begins."""
        self.rewind()
        self.dataset.start, self.dataset.source_state = 0, None
        drop_items(iter(self.dataset), sys.maxsize)

    def __len__(self) -> int:
        size = self.dataset.partition.batch_size if self.batch_size is not None else 1
        whole, rest = divmod(len(self.dataset), size)
        return whole + (rest > 0 and not self.drop_last)
