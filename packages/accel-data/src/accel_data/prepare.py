"""`prepare_data_loader`: from an ordinary DataLoader to one rank's part of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from accel_state import warn_user
from accel_state.errors import DataLoaderError

from .adapter import DataLoaderAdapter
from .dispatch import DataLoaderDispatcher
from .loader import DataLoaderShard
from .mesh import DataPlace, data_place
from .partition import Partition, check_rank
from .randomness import drawn_generator
from .samplers import SeedableRandomSampler, get_sampler, innermost_sampler
from .settings import loader_settings
from .shard import BatchSamplerShard, ItemShard
from .sources import ShardedStream, num_source_shards
from .stateful_loader import iterates_as_torchdata, with_torch_samplers
from .stream import IterableDatasetShard

_COPIED = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)


def prepare_data_loader(
    dataloader: DataLoader,
    device: torch.device | str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    gradient_state: Any = None,
    already_sharded: bool = False,
    seed_per_sample: bool = False,
) -> DataLoaderShard:
    """A loader that yields this rank's part of `dataloader`, whose settings it keeps and which it leaves untouched.

    Every rank gets the samples that Accelerate gives it for the same seed and settings. A shuffled loader owns its
    generator, seeded by one draw from torch's global one (unless the sampler brought one), also on one process:
    iterating never moves the global generator.

    Args:
        dataloader: over a map-style or iterable data set. One with a `DistributedSampler` for these ranks is not cut
            again.
        device: where `put_on_device` puts batches; the process's own by default.
        num_processes: ranks that share the data; by default those of `PartialState`.
        process_index: this rank among them; by default that of `PartialState`.
        split_batches: each batch is split over the ranks; its size must be a multiple of their number.
        put_on_device: move batches to the device.
        rng_types: generators set to rank 0's at the start of every iteration; ["generator"] by default, so that ranks
            with different seeds share one shuffle.
        dispatch_batches: rank 0 reads and sends each rank its part; needs a process group. False: every rank reads,
            an iterable data set from its start, and keeps its own part. None: as Accelerate, True for iterable data
            sets whose batches are put on a device, if there are several ranks.
        even_batches: complete the last round from the start of the order, so that all ranks get as many batches.
        slice_fn_for_dispatch: cuts dispatched batches; without effect unless batches are dispatched.
        use_seedable_sampler: shuffle by (seed, epoch) instead of by a generator that lives through the run.
        data_seed: the seed of that sampler; by default the one torch was seeded with.
        non_blocking: copy to the device without waiting; effective from pinned memory.
        use_stateful_dataloader: accepted; every prepared loader keeps its exact position.
        torch_device_mesh: ranks that differ along tp, cp, sp or pp only get the same batches, each reading them (or
            sent them, if batches are dispatched); number and index of parts come from its data axes.
        gradient_state: the mailbox through which gradient accumulation sees the end of an epoch.
        seed_per_sample: seed python, numpy and torch for each sample from (epoch, index), so that random transforms
            resume bit for bit, whichever process reads them. About 20 µs per sample.
        already_sharded: the loader yields this rank's part already: it is placed, counted and resumed, not cut.

    Raises:
        DataLoaderError: what is asked for does not fit the loader, or is not supported yet; the message says which.
    """
    _check_loader(dataloader)
    place = _place(num_processes, process_index, torch_device_mesh)
    if isinstance(dataloader, DataLoaderShard):
        raise DataLoaderError("This loader is prepared already; preparing it again would cut its part once more.")
    is_stream = isinstance(dataloader.dataset, IterableDataset)
    is_cut = already_sharded or (not is_stream and _is_cut_already(get_sampler(dataloader), place.count, place.index))
    common: dict[str, Any] = {
        "device": _device(device) if put_on_device else None,
        "rng_types": rng_types,
        "use_stateful_dataloader": use_stateful_dataloader,
        "_non_blocking": non_blocking,
        "gradient_state": gradient_state,
        "base_dataloader": dataloader,
        "seed_per_sample": seed_per_sample,
        **loader_settings(dataloader),
    }
    source = None if dispatch_batches or split_batches or is_cut else _sharded_stream(dataloader, place, even_batches)
    if source is not None:
        batching: dict[str, Any] = {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
        return DataLoaderShard(source, num_readers=len(place.part_of_rank), **batching, **common)
    dispatches = dispatch_batches
    if dispatches is None:
        dispatches = is_stream and put_on_device and _is_whole_group(place)
    order = None if is_stream else _owned_order(dataloader, use_seedable_sampler, data_seed)
    if dispatches and not is_cut and len(place.part_of_rank) > 1:
        _check_split(dataloader, place, split_batches)
        return DataLoaderDispatcher(
            split_batches=split_batches,
            even_batches=even_batches,
            _drop_last=dataloader.drop_last,
            slice_fn=slice_fn_for_dispatch,
            part_of_rank=place.part_of_rank,
            **_part(dataloader, order, DataPlace(1, 0, (0,)), split_batches=False, even_batches=even_batches),
            **common,
        )
    cut = DataPlace(1, 0, (0,)) if is_cut else place
    readers = 1 if is_cut else len(place.part_of_rank)
    return DataLoaderShard(num_readers=readers, **_part(dataloader, order, cut, split_batches, even_batches), **common)


def _sharded_stream(dataloader: DataLoader, place: DataPlace, even_batches: bool) -> ShardedStream | None:
    """The data set by its own shards, where it has some for every rank."""
    dataset = dataloader.dataset
    if not isinstance(dataset, IterableDataset):
        return None
    num_shards = num_source_shards(dataset)
    if num_shards is None or num_shards < place.count:
        return None
    return ShardedStream(dataset, num_shards, place.count, place.index, repeats=even_batches)


def _part(
    dataloader: DataLoader, order: Any, place: DataPlace, split_batches: bool, even_batches: bool
) -> dict[str, Any]:
    """The arguments of a loader over one part of the data set."""
    if order is None:
        return _stream_part(dataloader, place.count, place.index, split_batches, even_batches)
    return _map_style_part(dataloader, order, place.count, place.index, split_batches, even_batches)


def _map_style_part(
    dataloader: DataLoader, order: Any, world_size: int, rank: int, split_batches: bool, even_batches: bool
) -> dict[str, Any]:
    """The arguments of a loader over this rank's part of a map-style data set."""
    if dataloader.batch_sampler is not None:
        part = BatchSamplerShard(order, world_size, rank, split_batches, even_batches)
        return {"dataset": dataloader.dataset, "batch_sampler": part}
    if isinstance(order, BatchSampler):  # lists of indices that the data set takes whole
        items = BatchSamplerShard(order, world_size, rank, split_batches, even_batches)
    elif split_batches and world_size > 1:
        raise DataLoaderError("split_batches=True cannot split the items of a loader with batch_size=None.")
    else:
        items = ItemShard(order, world_size, rank, even_batches=even_batches)
    return {"dataset": dataloader.dataset, "sampler": items, "batch_size": None}


def _stream_part(
    dataloader: DataLoader, world_size: int, rank: int, split_batches: bool, even_batches: bool
) -> dict[str, Any]:
    """The arguments of a loader over this rank's part of an iterable data set."""
    part = IterableDatasetShard(
        dataloader.dataset,
        dataloader.batch_size or 1,
        dataloader.drop_last,
        world_size,
        rank,
        split_batches,
        even_batches=even_batches,
    )
    batch_size = None if dataloader.batch_size is None else part.partition.batch_size
    return {"dataset": part, "batch_size": batch_size, "drop_last": dataloader.drop_last}


def _check_loader(dataloader: Any) -> None:
    if not isinstance(dataloader, DataLoader):
        raise DataLoaderError(
            f"prepare_data_loader takes a torch DataLoader, but got a {type(dataloader).__name__}. "
            "Wrap the data in torch.utils.data.DataLoader(data, batch_size=...), or, to have the batches of an "
            "iterable moved to a device and nothing else, in accel_data.DevicePrefetcher(batches, device)."
        )
    known = (DataLoader.__iter__, DataLoaderAdapter.__iter__)
    if type(dataloader).__iter__ not in known and not iterates_as_torchdata(dataloader):
        warn_user(
            f"{type(dataloader).__name__} has an __iter__ of its own, which the prepared loader does not call: it "
            "iterates as torch's DataLoader does, over the same data set, order and collate function.",
        )


def _check_split(dataloader: DataLoader, place: DataPlace, split_batches: bool) -> None:
    if split_batches and dataloader.batch_size is not None:
        Partition.of_batches(
            dataloader.batch_size, place.count, place.index, split_batches=True, drop_last=False, even_batches=True
        )


def _place(num_processes: int | None, process_index: int | None, mesh: Any) -> DataPlace:
    """This rank's part of the data, from the arguments, the mesh or the process's state."""
    if num_processes is None or process_index is None:
        from accel_state import PartialState

        state = PartialState()
        num_processes = state.num_processes if num_processes is None else num_processes
        process_index = state.process_index if process_index is None else process_index
    check_rank(process_index, num_processes)
    if mesh is not None:
        return data_place(mesh, process_index)
    return DataPlace(num_processes, process_index, tuple(range(num_processes)))


def _is_whole_group(place: DataPlace) -> bool:
    """Whether the ranks are those of torch's process group, so that batches can be sent among them."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() == len(place.part_of_rank)


def _device(device: torch.device | str | None) -> torch.device | str:
    if device is not None:
        return device
    from accel_state import PartialState

    return PartialState().device


def _is_cut_already(sampler: Any, world_size: int, rank: int) -> bool:
    """Whether the sampler yields this rank's part only."""
    if not isinstance(sampler, DistributedSampler):
        return False
    if (sampler.num_replicas, sampler.rank) != (world_size, rank):
        raise DataLoaderError(
            f"The loader's DistributedSampler is cut for rank {sampler.rank} of {sampler.num_replicas}, but this is "
            f"rank {rank} of {world_size}. Use an ordinary sampler and let the loader be cut here."
        )
    return True


def _owned_order(dataloader: DataLoader, use_seedable_sampler: bool, data_seed: int | None) -> Any:
    """The loader's batch sampler (or sampler), with a generator of our own where its order is random.

    Samplers of torch are copied, so that the user's loader keeps its own; one that carries a generator keeps it.
    """
    batches: Any = dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler
    batches = with_torch_samplers(batches)
    if dataloader.batch_sampler is None and not isinstance(batches, BatchSampler):
        return _owned_sampler(batches, use_seedable_sampler, data_seed)
    if type(batches) is not BatchSampler:
        inner = innermost_sampler(batches)
        if getattr(inner, "generator", False) is None:
            inner.generator = drawn_generator()  # cannot be copied without its batch sampler
        return batches
    sampler = _owned_sampler(batches.sampler, use_seedable_sampler, data_seed)
    return batches if sampler is batches.sampler else BatchSampler(sampler, batches.batch_size, batches.drop_last)


def _owned_sampler(sampler: Any, use_seedable_sampler: bool, data_seed: int | None) -> Any:
    if use_seedable_sampler and type(sampler) is RandomSampler:
        seed = sampler.generator.initial_seed() if data_seed is None and sampler.generator is not None else data_seed
        return SeedableRandomSampler(
            sampler.data_source,
            sampler.replacement,
            sampler._num_samples,  # noqa: SLF001  (None follows the data set's length)
            data_seed=seed,
        )
    if not isinstance(sampler, Sampler) or getattr(sampler, "generator", False) is not None:
        return sampler
    owned = copy.copy(sampler) if type(sampler) in _COPIED else sampler
    owned.generator = drawn_generator()  # type: ignore[attr-defined]
    return owned
