"""Telling everything behind a loader which epoch begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accel_state import warn_user

from .stream import IterableDatasetShard

_INNER = ("batch_sampler", "sampler", "dataset", "data_source")


def tell_epoch(roots: tuple[Any, ...], epoch: int) -> None:
    """Call `set_epoch(epoch)` once on each object that has it: the roots and what they wrap."""
    for found in _with_wrapped(roots):
        set_epoch = getattr(found, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _with_wrapped(roots: tuple[Any, ...]) -> Iterator[Any]:
    seen: set[int] = set()
    todo = list(roots)
    while todo:
        found = todo.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        todo += [getattr(found, name, None) for name in _INNER]
        datasets = getattr(found, "datasets", None)  # torch's ConcatDataset, ChainDataset, StackDataset
        if isinstance(datasets, list | tuple):
            todo += datasets


def warn_of_deaf_workers(dataset: Any) -> None:
    """Persistent workers, once started, read from a copy of the data set that nobody can tell anything."""
    told = dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset
    if callable(getattr(told, "set_epoch", None)):
        warn_user(
            f"{type(told).__name__}.set_epoch does not reach persistent workers, which keep the copy of the data set "
            "that they were started with. Use persistent_workers=False, or a data set that comes in shards.",
        )
