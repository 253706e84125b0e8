"""Data sets that come in shards of their own, such as files: whole shards are dealt to ranks and their workers.

The position is one number per shard, so shards can be dealt anew to any number of ranks and workers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from .reading import drop_items
from .shard_places import ShardPlaces, is_finished, num_read, place_code


def num_source_shards(dataset: Any) -> int | None:
    """How many shards a data set says it has; None unless it has `num_shards` and `shard(index, num_shards)`."""
    count = getattr(dataset, "num_shards", None)
    return count if isinstance(count, int) and count > 0 and callable(getattr(dataset, "shard", None)) else None


def take_shard(dataset: Any, index: int, count: int) -> Any:
    """One shard of several: `shard(index=..., num_shards=...)` where the parameters have these names (Hugging Face's
    order is the reverse), else `shard(index, count)`."""
    parameters = inspect.signature(dataset.shard).parameters
    if {"index", "num_shards"} <= set(parameters):
        return dataset.shard(index=index, num_shards=count)
    return dataset.shard(index, count)


@dataclass(frozen=True)
class Tagged:
    """A sample, and the place in its shard once it was received, see `place_code`."""

    sample: Any
    shard: int
    place: int


@dataclass(frozen=True)
class TaggedCollate:
    """Collates samples, and says beside the batch where their shards stand after it.

    What it returns is a tuple, which torch's memory pinning knows how to enter.
    """

    collate: Callable[[Any], Any]

    def __call__(self, items: list[Tagged] | Tagged) -> tuple[Any, dict[int, int]]:
        if isinstance(items, Tagged):  # a loader with batch_size=None
            return self.collate(items.sample), {items.shard: items.place}
        return self.collate([item.sample for item in items]), {item.shard: item.place for item in items}


class ShardedStream(IterableDataset):
    """The samples of one rank's shards, each tagged; in a worker, those of the worker's.

    Args:
        dataset: with `num_shards` and `shard`. A shard with `skip(n)` is asked to start later; another one is read and
            dropped up to its position.
        num_shards: as many as the data set has.
        num_processes, process_index: parts that the shards are dealt to, and this rank's.
        repeats: a rank whose shards end first repeats its first batches; False: all stop with the first one.
        part_of_rank: every rank's part; by default each rank has its own.
    """

    def __init__(
        self,
        dataset: Any,
        num_shards: int,
        num_processes: int,
        process_index: int,
        *,
        repeats: bool = True,
        part_of_rank: tuple[int, ...] | None = None,
    ) -> None:
        self.dataset = dataset
        self.num_shards = num_shards
        self.num_processes = num_processes
        self.process_index = process_index
        self.repeats = repeats
        self.part_of_rank = tuple(range(num_processes)) if part_of_rank is None else part_of_rank
        # epoch, samples to drop, a place per shard, then the deal; in shared memory: persistent workers see it too
        self._control = torch.zeros(2 + 2 * num_shards, dtype=torch.int64).share_memory_()
        self.start_at(ShardPlaces.start(num_shards), 0)

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set, here and in workers."""
        self._control[0] = epoch
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def start_at(self, places: ShardPlaces, num_dropped: int) -> None:
        """Let the next iteration begin at these places, less the samples that are dropped first."""
        self._control[1:] = torch.tensor([num_dropped, *places.codes, *places.deal], dtype=torch.int64)

    def shards_of(self, worker: int, num_workers: int) -> list[int]:
        """The shards that one worker of this rank reads: ranks are served before workers."""
        deal: list[int] = self._control[2 + self.num_shards :].tolist()
        return deal[self.process_index + worker * self.num_processes :: self.num_processes * num_workers]

    def __iter__(self) -> Iterator[Tagged]:
        info = get_worker_info()
        own = self.shards_of(0, 1) if info is None else self.shards_of(info.id, info.num_workers)
        epoch, num_dropped = self._control[:2].tolist()
        places = self._control[2 : 2 + self.num_shards].tolist()
        if info is not None:
            self.set_epoch(epoch)
        samples = (tagged for shard in own for tagged in self._read(shard, places[shard], epoch))
        drop_items(samples, num_dropped)
        yield from samples

    def _read(self, shard: int, place: int, epoch: int) -> Iterator[Tagged]:
        """The rest of a shard. It is read one sample ahead, so that the last one is known when it is received."""
        if is_finished(place):
            return
        first = num_read(place)
        reader = _OnlyReader(lambda: self._open(shard, first, epoch))
        sample = next(reader, _NOTHING)
        number = first
        while sample is not _NOTHING:
            number += 1
            following = next(reader, _NOTHING)
            yield Tagged(sample, shard, place_code(number, is_finished=following is _NOTHING))
            sample = following

    def _open(self, shard: int, first: int, epoch: int) -> Iterator[Any]:
        """The samples of a shard after the first ones. A shard cut from a data set need not know its epoch."""
        source = take_shard(self.dataset, shard, self.num_shards)
        set_epoch = getattr(source, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        if first and callable(getattr(source, "skip", None)):
            source, first = source.skip(first), 0
        samples: Iterator[Any] = iter(source)
        drop_items(samples, first)
        return samples


_NOTHING = object()


class _OnlyReader(Iterator[Any]):
    """Reads a shard whose data set does not see that it is in a worker: some (Hugging Face's) would cut it again.

    Args:
        samples: opens the shard.
    """

    def __init__(self, samples: Callable[[], Iterable[Any]]) -> None:
        self._open = samples
        self._samples: Iterator[Any] | None = None

    def __next__(self) -> Any:
        before = torch_worker._worker_info  # noqa: SLF001  (torch has no public way)
        torch_worker._worker_info = None  # noqa: SLF001
        try:
            if self._samples is None:
                self._samples = iter(self._open())
            return next(self._samples)
        finally:
            torch_worker._worker_info = before  # noqa: SLF001


def advanced(codes: tuple[int, ...], marks: Mapping[int, int]) -> tuple[int, ...]:
    """Places after a batch."""
    moved = list(codes)
    for shard, place in marks.items():
        moved[shard] = place
    return tuple(moved)
