"""`BatchSamplerShard`: one rank's part of a batch sampler."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler

from accel_state.errors import DataLoaderError

from .feeds import Feed, KnownFeed, ReadFeed
from .orders import draw_order, finish_order
from .partition import Partition, check_rank
from .reading import BatchDeal, batch_portions, drop_items, sample_portions


class BatchSamplerShard(BatchSampler):
    """The batches of one rank, so that all ranks together see the order of the batch sampler inside.

    Torch's own samplers are cut by arithmetic; any other is read by every rank, which keeps its own batches.

    Args:
        batch_sampler: any iterable of lists of indices. One without `batch_size` and `drop_last` is dealt as it comes.
        num_processes: ranks that share it.
        process_index: this rank.
        split_batches: every rank gets a part of each batch (`batch_size / num_processes` samples) instead of a
            batch of its own.
        even_batches: complete the last round with samples from the start, so that all ranks get as many batches.

    Raises:
        DataLoaderError: a rank out of range; under `split_batches`, a batch size that is unknown or does not divide.
    """

    items_are_lists = True

    def __init__(
        self,
        batch_sampler: Iterable[Any],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        check_rank(process_index, num_processes)
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)
        self.armed: Feed | None = None  # the pass that the next iteration reads, where a loader has prepared one
        if split_batches and num_processes > 1 and self.batch_size is None:
            raise DataLoaderError(
                f"split_batches=True needs to know the batch size, and {type(self.batch_sampler).__name__} has no "
                "`batch_size`. Give it one, or use split_batches=False."
            )
        self._partition()  # which refuses a size that does not divide

    # ---- what a position counts

    @property
    def counts_samples(self) -> bool:
        """Whether positions count samples (torch's own BatchSampler) or batches (any other)."""
        return type(self.batch_sampler) is BatchSampler

    @property
    def num_units(self) -> int | None:
        """Samples or batches of the whole order; None where the sampler does not tell."""
        counted: Any = self.batch_sampler.sampler if self.counts_samples else self.batch_sampler  # type: ignore[attr-defined]
        try:
            return len(counted)
        except TypeError:
            return None

    @property
    def units_per_step(self) -> int:
        """Samples or batches of the order that all ranks together consume in one step."""
        if self.counts_samples:
            return self._partition().round_size
        return self._deal().batches_per_round

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all ranks together take in one step; None where the batch sampler does not tell."""
        if self.batch_size is None or self.split_batches:
            return self.batch_size
        return self.batch_size * self.num_processes

    # ---- a pass over the data

    def open(self, start: int = 0) -> Feed:
        """This rank's batches of a new pass, after the first `start` units; draws the order where it is random."""
        if not self.counts_samples:
            return ReadFeed(partial(batch_portions, self.batch_sampler, self._deal(), start))
        sampler = self.batch_sampler.sampler  # type: ignore[attr-defined]
        order = draw_order(sampler)
        if order is None:
            return ReadFeed(partial(sample_portions, sampler, self._partition(), start))
        return KnownFeed(order, self._partition(), start)

    def finish(self) -> None:
        """Leave the sampler's generator where reading the pass to its end leaves it."""
        if self.counts_samples:
            finish_order(self.batch_sampler.sampler)  # type: ignore[attr-defined]

    def pass_over(self) -> None:
        """Draw what a whole pass draws, without handing anything out."""
        feed = self.open()
        if isinstance(feed, ReadFeed):
            drop_items(iter(feed), sys.maxsize)
        self.finish()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.open() if self.armed is None else self.armed)

    @property
    def total_length(self) -> int:
        """Batches of the batch sampler inside."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        """This rank's batches in a whole pass."""
        units = self.num_units
        if units is None:
            raise TypeError(f"{type(self.batch_sampler).__name__} has no length, so its part for one rank has none.")
        return self.num_batches(units)

    def num_batches(self, remaining: int) -> int:
        """This rank's batches when `remaining` units are left."""
        if self.counts_samples:
            return self._partition().num_batches(remaining)
        per_step = self._deal().batches_per_round
        unit_of_rank = Partition(
            batch_size=1,
            world_size=per_step,
            rank=min(self.process_index, per_step - 1),
            drop_last=self.drop_last,
            even_batches=self.even_batches,
        )
        return unit_of_rank.num_batches(remaining)

    def _partition(self) -> Partition:
        return Partition.of_batches(
            1 if self.batch_size is None else self.batch_size,
            self.num_processes,
            self.process_index,
            split_batches=self.split_batches and self.batch_size is not None,
            drop_last=self.drop_last,
            even_batches=self.even_batches,
        )

    def _deal(self) -> BatchDeal:
        return BatchDeal(
            world_size=self.num_processes,
            rank=self.process_index,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            even_batches=self.even_batches,
            split_batches=self.split_batches,
            are_lists=self.items_are_lists,
        )


class ItemShard(BatchSamplerShard):
    """One rank's items of a sampler, for loaders with `batch_size=None`: each item counts as a batch."""

    items_are_lists = False

    @property
    def counts_samples(self) -> bool:
        """False: items may be indices, keys or lists of them."""
        return False
