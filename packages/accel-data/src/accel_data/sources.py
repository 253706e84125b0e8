"""Data sets that come in shards of their own, such as files: whole shards are dealt to ranks and their workers.

The position is one number per shard, so shards can be dealt anew to any number of ranks and workers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from .reading import drop_items


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
    """A sample, and where its shard stands once it was received."""

    sample: Any
    shard: int
    position: int


@dataclass(frozen=True)
class TaggedCollate:
    """Collates samples, and says beside the batch where their shards stand after it.

    What it returns is a tuple, which torch's memory pinning knows how to enter.
    """

    collate: Callable[[Any], Any]

    def __call__(self, items: list[Tagged] | Tagged) -> tuple[Any, dict[int, int]]:
        if isinstance(items, Tagged):  # a loader with batch_size=None
            return self.collate(items.sample), {items.shard: items.position}
        return self.collate([item.sample for item in items]), {item.shard: item.position for item in items}


class ShardedStream(IterableDataset):
    """The samples of one rank's shards, each tagged; in a worker, those of the worker's.

    Args:
        dataset: with `num_shards` and `shard`. A shard with `skip(n)` is asked to start later; another one is read and
            dropped up to its position.
        num_shards: as many as the data set has.
        num_processes, process_index: ranks, and this one.
        repeats: a rank whose shards end first repeats its first batches; False: all stop with the first one.
    """

    def __init__(
        self, dataset: Any, num_shards: int, num_processes: int, process_index: int, *, repeats: bool = True
    ) -> None:
        self.dataset = dataset
        self.num_shards = num_shards
        self.num_processes = num_processes
        self.process_index = process_index
        self.repeats = repeats
        # epoch, samples to drop, then a position per shard; in shared memory, so that persistent workers see it too
        self._control = torch.zeros(2 + num_shards, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set, here and in workers."""
        self._control[0] = epoch
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def start_at(self, positions: tuple[int, ...], num_dropped: int) -> None:
        """Let the next iteration begin at these positions, less the samples that are dropped first."""
        self._control[1] = num_dropped
        self._control[2:] = torch.tensor(positions, dtype=torch.int64)

    def shards_of(self, worker: int, num_workers: int) -> range:
        """The shards that one worker of this rank reads: ranks are served before workers."""
        first = self.process_index + worker * self.num_processes
        return range(first, self.num_shards, self.num_processes * num_workers)

    def __iter__(self) -> Iterator[Tagged]:
        info = get_worker_info()
        own = self.shards_of(0, 1) if info is None else self.shards_of(info.id, info.num_workers)
        epoch, num_dropped, *positions = self._control.tolist()
        if info is not None:
            self.set_epoch(epoch)
        with _as_only_reader():
            samples = (tagged for shard in own for tagged in self._read(shard, positions[shard]))
            drop_items(samples, num_dropped)
            yield from samples

    def _read(self, shard: int, position: int) -> Iterator[Tagged]:
        source = take_shard(self.dataset, shard, self.num_shards)
        if position and callable(getattr(source, "skip", None)):
            samples = iter(source.skip(position))
        else:
            samples = iter(source)
            drop_items(samples, position)
        for number, sample in enumerate(samples, start=position + 1):
            yield Tagged(sample, shard, number)


@contextmanager
def _as_only_reader() -> Iterator[None]:
    """Hide the worker from the data set, which would cut the shard again for it (Hugging Face's do)."""
    before = torch_worker._worker_info  # noqa: SLF001  (torch has no public way)
    torch_worker._worker_info = None  # noqa: SLF001
    try:
        yield
    finally:
        torch_worker._worker_info = before  # noqa: SLF001


def advanced(positions: tuple[int, ...], marks: Mapping[int, int]) -> tuple[int, ...]:
    """Positions after a batch."""
    moved = list(positions)
    for shard, position in marks.items():
        moved[shard] = position
    return tuple(moved)
