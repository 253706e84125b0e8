"""`DataLoaderShard`: one rank's batches, on its device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from accel_state.errors import DataLoaderError

from .adapter import DataLoaderAdapter
from .position import Cursor, require_count
from .prefetch import moved
from .randomness import checked_kinds
from .samplers import innermost_sampler


class DataLoaderShard(DataLoaderAdapter):
    """A loader that yields this rank's batches, on a device, and resumes at any of them.

    `prepare_data_loader` makes one from an ordinary loader; that is the usual way.

    Args:
        dataset: map-style or iterable.
        device: where batches go; None leaves them where the collate function made them.
        rng_types: generators set to rank 0's at the start of every iteration; the order's own ("generator") by default.
        synchronized_generator: the generator that decides the order, where the sampler has none of its own.
        skip_batches: own batches to leave out at the start of every iteration.
        use_stateful_dataloader: adds nothing: every loader here keeps its exact position.
        _drop_last: adds nothing: the batch sampler says whether a short round is dropped.
        _non_blocking: copy to the device without waiting; effective from pinned memory.
        torch_device_mesh: None; `prepare_data_loader` is what reads a mesh.
        iteration: the epoch to begin with.
        gradient_state: where gradient accumulation looks for the loader being read.
        base_dataloader: the loader that this one was made from; itself by default.
        seed_per_sample: seed python, numpy and torch for each sample from (epoch, index).
        num_readers: ranks that have to agree on the order, where more than one gets the same part.
        **kwargs: those of `torch.utils.data.DataLoader`. A `batch_sampler` that is no `BatchSamplerShard` is taken as
            this rank's part already.

    Raises:
        DataLoaderError: `in_order=False`, a mesh, or generators in `rng_types` that are not here.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        *,
        gradient_state: Any = None,
        base_dataloader: DataLoader | None = None,
        seed_per_sample: bool = False,
        num_readers: int | None = None,
        **kwargs: Any,
    ) -> None:
        if seed_per_sample and isinstance(dataset, IterableDataset):
            raise DataLoaderError("seed_per_sample=True needs a map-style data set: samples of a stream have no index.")
        if torch_device_mesh is not None:
            raise DataLoaderError("A loader does not read a mesh: pass it to prepare_data_loader instead.")
        super().__init__(dataset, use_stateful_dataloader, **kwargs)
        self._cursor = Cursor(epoch=iteration)
        self._base = base_dataloader
        self._readers = num_readers
        self.device = None if device is None else torch.device(device)
        self.non_blocking = _non_blocking
        self.rng_types = ["generator"] if rng_types is None else checked_kinds(rng_types)
        self.skip_batches = skip_batches
        self.seed_per_sample = seed_per_sample
        self.gradient_state = gradient_state
        self.transform: Callable[[Any], Any] | None = None
        """What each batch becomes before it is put on the device, on every rank alike; it keeps the first dim."""
        if self.synchronized_generator is None and synchronized_generator is not None:
            self.synchronized_generator = self._worker_source = synchronized_generator

    def _placed(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self.transform is not None:
            batches = map(self.transform, batches)
        return moved(batches, self.device, non_blocking=self.non_blocking)

    @property
    def _num_readers(self) -> int:
        return self._shard.num_processes if self._readers is None else self._readers

    def skipping(self, num_batches: int) -> Self:
        """A loader over the same order and progress, whose iterations leave out the first `num_batches` of an epoch.

        They count from the start of the epoch, and use up a loaded position.
        """
        require_count(num_batches)
        twin = copy.copy(self)
        twin.skip_batches = self.skip_batches + num_batches
        twin._skips_by_hand = True  # noqa: SLF001  (its own class)
        return twin

    @property
    def base_dataloader(self) -> DataLoader:
        """The loader that this one was made from."""
        return self if self._base is None else self._base

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all ranks together take in one step; None for a batch sampler that does not tell."""
        size = self._shard.total_batch_size
        sampler = innermost_sampler(self._shard)
        return size * sampler.num_replicas if size and isinstance(sampler, DistributedSampler) else size

    @property
    def rank_batch_size(self) -> int | None:
        """Samples that this rank takes in one step, but for the last; None for a batch sampler that does not tell."""
        size = self._shard.total_batch_size
        return None if size is None else size // self._shard.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Samples in the data set, over all ranks."""
        return int(getattr(self.dataset, "total_length", None) or len(self.dataset))  # type: ignore[arg-type]
