"""Loaders that begin later."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accel_state.errors import DataLoaderError

from .loader import DataLoaderShard
from .position import require_count
from .samplers import SkipBatchSampler
from .settings import loader_settings


class SkipDataLoader(DataLoaderShard):
    """A loader that leaves out its first `skip_batches` batches on every iteration.

    Args:
        dataset: map-style or iterable.
        skip_batches: batches to leave out.
        use_stateful_dataloader: adds nothing: the loader keeps its exact position.
        **kwargs: those of `torch.utils.data.DataLoader`.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)


def skip_first_batches(dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
    """A new loader with all settings of `dataloader` that begins `num_batches` later.

    It is meant for one epoch: the one that a resumed run continues. A prepared loader shares its order and epoch count
    with the new one and stays as it is otherwise: after the new one was read, its next epoch is whole and the next in
    order. Batches are counted from the epoch's start, whatever position was loaded, and that position is used up.

    Args:
        dataloader: prepared (nothing is read to skip) or ordinary (indices are read and dropped, data is not).
        num_batches: this rank's batches to leave out.

    Raises:
        DataLoaderError: no loader, or no whole number from 0.
    """
    if not hasattr(dataloader, "dataset"):
        raise DataLoaderError(f"skip_first_batches takes a DataLoader, and got {dataloader!r}")
    if isinstance(dataloader, DataLoaderShard):
        return dataloader.skipping(num_batches)
    require_count(num_batches)
    settings = loader_settings(dataloader)
    if isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader(
            dataloader.dataset,
            skip_batches=num_batches,
            batch_size=dataloader.batch_size,
            drop_last=dataloader.drop_last,
            **settings,
        )
    if dataloader.batch_sampler is None:
        sampler = SkipBatchSampler(dataloader.sampler, num_batches)
        return DataLoader(dataloader.dataset, sampler=sampler, batch_size=None, **settings)
    batches = SkipBatchSampler(dataloader.batch_sampler, num_batches)
    return DataLoader(dataloader.dataset, batch_sampler=batches, **settings)
