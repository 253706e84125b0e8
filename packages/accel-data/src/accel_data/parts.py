"""What a loader reads, by the kind of its data set and sampler: the three parts have one shape."""

from __future__ import annotations

from typing import TypeAlias

from torch.utils.data import DataLoader, IterableDataset

from .samplers import innermost_sampler
from .shard import BatchSamplerShard, ItemShard
from .source_part import SourcePart
from .sources import ShardedStream
from .stream import StreamPart

Part: TypeAlias = BatchSamplerShard | StreamPart | SourcePart
"""This rank's part of a map-style data set, of a stream, or of a data set in shards."""


def own_part(loader: DataLoader) -> Part:
    """This rank's part of a loader just constructed; torch's attributes are made to say what the user wrote.

    torch forbids to set them after construction, since it would not notice; here that is the point.
    """
    attributes = vars(loader)
    if isinstance(loader.dataset, ShardedStream):
        return _source_part(loader, loader.dataset)
    if isinstance(loader.dataset, IterableDataset):
        stream = StreamPart(loader)
        attributes["dataset"] = stream.dataset
        return stream
    if loader.batch_sampler is None:
        order = loader.sampler
        items = order if isinstance(order, BatchSamplerShard) else ItemShard(order)
        attributes["sampler"] = items
        return items
    given = loader.batch_sampler
    part = given if isinstance(given, BatchSamplerShard) else BatchSamplerShard(given)
    attributes.update(
        batch_sampler=part, batch_size=part.batch_size, drop_last=part.drop_last, sampler=innermost_sampler(part)
    )
    return part


def _source_part(loader: DataLoader, stream: ShardedStream) -> SourcePart:
    return SourcePart(
        stream, loader.batch_size, repeats=stream.repeats and not loader.drop_last, has_workers=loader.num_workers > 0
    )
