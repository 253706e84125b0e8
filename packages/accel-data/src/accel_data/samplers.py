"""Samplers of our own, and finding the sampler inside a loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order is a function of (seed, epoch): that of a generator seeded with their sum.

    Args:
        *args, **kwargs: those of `torch.utils.data.RandomSampler`.
        data_seed: the seed; by default the one torch was last seeded with, so that `set_seed` decides.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed: int = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0
        if self.generator is None:
            self.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is drawn next."""
        self.epoch = epoch

    def reseed(self) -> None:
        """Put the generator at the start of the current epoch."""
        self.generator.manual_seed(self.initial_seed + self.epoch)

    def __iter__(self) -> Iterator[int]:
        self.reseed()
        yield from super().__iter__()
        self.epoch += 1


class SkipBatchSampler(BatchSampler):
    """A batch sampler that leaves out the first `skip_batches` of another, by reading and dropping their indices."""

    def __init__(self, batch_sampler: Iterable[Any], skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:
        return islice(self.batch_sampler, self.skip_batches, None)

    @property
    def total_length(self) -> int:
        """Batches of the batch sampler inside."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return max(self.total_length - self.skip_batches, 0)


def get_sampler(dataloader: DataLoader) -> Any:
    """The sampler that decides a loader's order: the innermost one, whatever batch samplers lie around it."""
    found: Any = dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler
    return innermost_sampler(found)


def innermost_sampler(sampler: Any) -> Any:
    """Follow `batch_sampler` and `sampler` attributes inwards."""
    while True:
        inner = getattr(sampler, "batch_sampler", None)
        if inner is None:
            inner = getattr(sampler, "sampler", None)
        if inner is None:
            return sampler
        sampler = inner


def set_innermost_sampler(holder: Any, sampler: Any) -> None:
    """Put `sampler` where `innermost_sampler(holder)` is. Torch's batch samplers are replaced: users share them."""
    while True:
        name = "batch_sampler" if getattr(holder, "batch_sampler", None) is not None else "sampler"
        inner = getattr(holder, name)
        if type(inner) is BatchSampler:
            setattr(holder, name, BatchSampler(sampler, inner.batch_size, inner.drop_last))
            return
        if innermost_sampler(inner) is inner:
            setattr(holder, name, sampler)
            return
        holder = inner
