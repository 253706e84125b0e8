"""Loaders inside a block in which ranks may run out of data at different times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from accel_state import warn_user

from .adapter import DataLoaderAdapter
from .dispatch import DataLoaderDispatcher
from .shard import BatchSamplerShard


@contextmanager
def uneven_inputs(loaders: Iterable[Any], even_batches: bool | None = None) -> Iterator[None]:
    """The loader half of torch's `Join`: inside the block a rank may run out of data before others.

    Args:
        loaders: prepared ones; others are passed over.
        even_batches: what map-style loaders do in passes that begin in the block; None leaves them as they are.

    Warns:
        UserWarning: `even_batches` is given and a loader is iterable, which stays as it is.
    """
    prepared = [loader for loader in loaders if isinstance(loader, DataLoaderAdapter)]
    holders = [] if even_batches is None else [holder for loader in prepared if (holder := _holder(loader)) is not None]
    if even_batches is not None and len(holders) < len(prepared):
        warn_user(
            f"even_batches={even_batches} is not applied to iterable data sets: {len(prepared) - len(holders)} of "
            f"{len(prepared)} loaders stay as they are.",
        )
    before = [(holder, holder.even_batches) for holder in holders]
    joined = [(loader, loader.joins_uneven_inputs) for loader in prepared]
    try:
        for holder in holders:
            holder.even_batches = even_batches
        for loader in prepared:
            loader.joins_uneven_inputs = True
        yield
    finally:
        for holder, was_even in before:
            holder.even_batches = was_even
        for loader, did_join in joined:
            loader.joins_uneven_inputs = did_join


def _holder(loader: DataLoaderAdapter) -> Any:
    """What decides how a map-style loader's last round ends; None for an iterable data set."""
    part = loader.part
    if not isinstance(part, BatchSamplerShard):
        return None
    return loader if isinstance(loader, DataLoaderDispatcher) else part
