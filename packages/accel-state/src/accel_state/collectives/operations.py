"""Collectives over nested tensors: gather, broadcast, reduce, pad.

Each begins with an exchange of slots (`channel.py`): ranks that do not fit together raise, all of them. What is small
and on the CPU has then arrived already; the rest follows as one message of bytes per kind of device.
"""

from __future__ import annotations

import functools
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accel_state.collectives import layout
from accel_state.collectives.channel import Call, Channel
from accel_state.collectives.layout import as_bytes, as_message, from_bytes, padding
from accel_state.collectives.trees import map_leaves

_CPU = torch.device("cpu")
REDUCTIONS = ("sum", "mean", "max", "none")


def _channel() -> Channel | None:
    """Our group, or None when this process is the only one."""
    from accel_state.process_group import current_job

    channel = current_job().channel
    return None if channel is None or channel.world_size == 1 else channel


def wait_for_everyone() -> None:
    """Return when every rank is here. One exchange of slots on the CPU; does not wait for devices."""
    channel = _channel()
    if channel is not None:
        channel.exchange(channel.begin("wait_for_everyone"))


# ---------------------------------------------------------------- gather


def gather(tensor: Any) -> Any:
    """All ranks' tensors, one after the other along the first dimension, on every rank.

    Args:
        tensor: any nesting of tensors; first dimensions may differ between ranks, all else may not. A tensor without
            dimensions counts as one item.

    Raises:
        TypeError: a leaf that is not a tensor; names its place.
        CollectiveMismatchError: the ranks' data differ, or one did not come.

    Cost: an exchange of slots; beyond 3.5 KiB, and for tensors on a device, one all-gather per kind of device, of the
    longest rank's bytes. No device is waited for.
    """
    channel = _channel()
    if channel is None:
        return tensor
    leaves, text = _flatten(channel, tensor, "gather", layout.any_first)
    leaves = [leaf.reshape(1) if leaf.ndim == 0 else leaf for leaf in leaves]
    by_device = _by_device(leaves)
    head = struct.pack(f"{len(leaves)}q", *[leaf.shape[0] for leaf in leaves])
    on_cpu = [leaves[index] for index in by_device.get(_CPU, ())]
    is_inline = channel.fits(len(head), sum(_padded_bytes(leaf) for leaf in on_cpu))
    call = channel.begin(text)
    replies = channel.exchange(call, head, [as_bytes(leaf) for leaf in on_cpu] if is_inline else ())
    sizes_by_rank = [struct.unpack(f"{len(leaves)}q", one) for one in replies.heads]
    gathered: dict[int, torch.Tensor] = {}
    for device, indices in by_device.items():
        mine = [leaves[index] for index in indices]
        sizes = [[of_rank[index] for index in indices] for of_rank in sizes_by_rank]
        lengths = [sum(map(_padded_bytes, mine, of_rank)) for of_rank in sizes]
        if device == _CPU and all(channel.fits(len(head), length) for length in lengths):
            rows = replies.bodies
        else:
            rows = _all_gather(channel, mine, lengths, call)
        gathered.update(zip(indices, _join(mine, rows, sizes), strict=True))
    return _with_leaves(tensor, [gathered[index] for index in range(len(leaves))])


def _all_gather(channel: Channel, mine: Sequence[torch.Tensor], lengths: Sequence[int], call: Call) -> torch.Tensor:
    """Each rank's bytes of the tensors of one device, `[world_size, longest]`."""
    parts = [as_bytes(leaf) for leaf in mine]
    is_as_it_is = len(parts) == 1 and len(set(lengths)) == 1  # one tensor, equally long everywhere: no copy
    return channel.all_gather_bytes(parts[0] if is_as_it_is else as_message(parts, max(lengths)), call)


def _join(
    mine: Sequence[torch.Tensor], rows: torch.Tensor, sizes_by_rank: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Per tensor, all ranks' parts in one."""
    if all(sizes == sizes_by_rank[0] for sizes in sizes_by_rank):
        return _join_equal(mine, rows)
    parts: list[list[torch.Tensor]] = [[] for _ in mine]
    for row, sizes in zip(rows, sizes_by_rank, strict=True):
        at = 0
        for index, (leaf, size) in enumerate(zip(mine, sizes, strict=True)):
            num_bytes = size * _item_bytes(leaf)
            parts[index].append(from_bytes(row[at : at + num_bytes], leaf.dtype, (size, *leaf.shape[1:])))
            at += num_bytes + padding(num_bytes)
    return [torch.cat(one) for one in parts]


def _join_equal(mine: Sequence[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    """As `_join` where all ranks have equally much: few torch operations, whatever the number of ranks."""
    joined = []
    for leaf, column in zip(mine, _columns(mine, rows), strict=True):
        joined.append(column.reshape(rows.shape[0] * leaf.shape[0], *leaf.shape[1:]).contiguous())
    return joined


def _columns(like: Sequence[torch.Tensor], rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Per tensor, `[world_size, numel]` of its dtype: a view of the rows of bytes."""
    at = 0
    for leaf in like:
        num_bytes = leaf.numel() * leaf.element_size()
        yield rows[:, at : at + num_bytes].view(leaf.dtype)
        at += num_bytes + padding(num_bytes)


def gather_object(object: Any) -> list[Any]:  # noqa: A002  (the peer's name)
    """All ranks' objects on every rank; pickled on the way.

    Args:
        object: a list or tuple, whose items are joined to one list; anything else counts as one item. (The peer takes
            texts apart into characters and dicts into keys.)

    Cost: an exchange of slots; beyond 3.5 KiB an all-gather of the longest rank's pickle.
    """
    channel = _channel()
    if channel is None:
        return object  # type: ignore[no-any-return]  # as the peer: untouched
    everyone = channel.exchange_objects("gather_object", object)
    if isinstance(object, (list, tuple)):
        return [item for items in everyone for item in (items if isinstance(items, (list, tuple)) else [items])]
    return everyone


# ---------------------------------------------------------------- broadcast


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """One rank's tensors on every rank; the inputs stay as they are.

    Args:
        tensor: any nesting of tensors, of the same layout and shapes on all ranks.
        from_process: whose values.

    Raises:
        TypeError: a leaf that is not a tensor; names its place.
        CollectiveMismatchError: the ranks' data differ, or one did not come.

    Cost: an exchange of slots; beyond 3.5 KiB, and for tensors on a device, one broadcast per kind of device.
    """
    channel = _channel()
    if channel is None:
        return tensor
    leaves, text = _flatten(channel, tensor, f"broadcast from rank {from_process} of", layout.whole)
    _check_rank(channel, from_process, text)
    by_device = _by_device(leaves)
    is_source = channel.rank == from_process
    on_cpu = [as_bytes(leaves[index]) for index in by_device.get(_CPU, ())] if is_source else []
    call = channel.begin(text)
    rows = channel.exchange(call, body=on_cpu, source=from_process).bodies
    received: dict[int, torch.Tensor] = {}
    for device, indices in by_device.items():
        mine = [leaves[index] for index in indices]
        row = rows[from_process]
        if device != _CPU:
            row = as_message([as_bytes(leaf) for leaf in mine], sum(map(_padded_bytes, mine)))
            channel.broadcast_bytes(row, from_process, call)
        columns = _columns(mine, row[None])
        received.update(
            zip(indices, (c.view(v.shape).clone() for c, v in zip(columns, mine, strict=True)), strict=True)
        )
    return _with_leaves(tensor, [received[index] for index in range(len(leaves))])


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of a list, in place, by those of one rank; pickled on the way. Returns the list."""
    channel = _channel()
    if channel is not None:
        text = f"broadcast_object_list from rank {from_process} of {len(object_list)} objects"
        _check_rank(channel, from_process, text)
        object_list[:] = channel.broadcast_object(text, list(object_list), from_process)
    return object_list


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Rank 0's tensor on every rank's device; the others give nothing.

    Args:
        tensor: on rank 0, of any shape.

    Raises:
        ValueError: rank 0 gives none.
    """
    from accel_state.process_group import current_job

    job, channel = current_job(), _channel()
    if channel is not None:
        tensor = channel.broadcast_object("copy_tensor_to_devices", None if tensor is None else tensor.cpu(), 0)
    if tensor is None:
        raise ValueError("copy_tensor_to_devices: rank 0 has to give a tensor, and it gave None")
    return tensor.to(job.device)


def _check_rank(channel: Channel, rank: int, text: str) -> None:
    if not 0 <= rank < channel.world_size:
        raise ValueError(f"{text}: there is no such rank; allowed are 0 to {channel.world_size - 1}")


# ---------------------------------------------------------------- reduce


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Sum, mean or maximum over the ranks, element by element; the inputs stay as they are.

    Args:
        tensor: any nesting of tensors, of the same layout and shapes on all ranks.
        reduction: `sum`, `mean` (of integers: floating point), `max`, or `none`, which returns the values untouched.
        scale: multiplies on XLA only; elsewhere another value than 1 warns once.

    Raises:
        ValueError: another word for `reduction`.
        TypeError: a leaf that is not a tensor; names its place.
        CollectiveMismatchError: the ranks' data differ, or one did not come.

    Cost: an exchange of slots; beyond 3.5 KiB, and for tensors on a device, one all-reduce per dtype and device.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is not known; allowed are {', '.join(REDUCTIONS)}")
    if scale != 1.0:
        _warn_scale(scale)
    channel = _channel()
    if channel is None or reduction == "none":
        return tensor
    leaves, text = _flatten(channel, tensor, f"reduce ({reduction}) of", layout.whole)
    leaves = [_summable(leaf.detach(), reduction) for leaf in leaves]
    is_small = set(_by_device(leaves)) <= {_CPU} and channel.fits(0, sum(map(_padded_bytes, leaves)))
    call = channel.begin(text)
    rows = channel.exchange(call, body=[as_bytes(leaf) for leaf in leaves] if is_small else ()).bodies
    totals = _reduce_rows(leaves, rows, reduction) if is_small else _all_reduce(channel, leaves, reduction, call)
    if reduction == "mean":
        totals = [total / channel.world_size for total in totals]
    return _with_leaves(tensor, totals)


@functools.cache
def _warn_scale(scale: float) -> None:
    from accel_state.process_group import current_job

    if current_job().kind.name != "xla":
        warnings.warn(f"scale={scale} of reduce has an effect on XLA only", stacklevel=3)


def _summable(leaf: torch.Tensor, reduction: str) -> torch.Tensor:
    """Truth values are counted; 8-bit floats, which nothing can add up, are added as float32."""
    if leaf.dtype == torch.bool and reduction != "max":
        return leaf.to(torch.int64)
    return leaf.float() if leaf.is_floating_point() and leaf.element_size() == 1 else leaf


def _reduce_rows(leaves: Sequence[torch.Tensor], rows: torch.Tensor, reduction: str) -> list[torch.Tensor]:
    """Here, from what all ranks sent: the same bits on all of them."""
    totals = []
    for leaf, column in zip(leaves, _columns(leaves, rows), strict=True):
        total = column.amax(0) if reduction == "max" else column.sum(0, dtype=leaf.dtype)
        totals.append(total.view(leaf.shape))
    return totals


def _all_reduce(channel: Channel, leaves: Sequence[torch.Tensor], reduction: str, call: Call) -> list[torch.Tensor]:
    operation = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, leaf in enumerate(leaves):
        groups.setdefault((leaf.device, leaf.dtype), []).append(index)
    totals: dict[int, torch.Tensor] = {}
    for indices in groups.values():
        mine = [leaves[index] for index in indices]
        flat = torch.cat([leaf.reshape(-1) for leaf in mine])
        channel.all_reduce(flat, operation, call)
        parts = flat.split([leaf.numel() for leaf in mine])
        totals.update(zip(indices, (p.view(leaf.shape) for p, leaf in zip(parts, mine, strict=True)), strict=True))
    return [totals[index] for index in range(len(leaves))]


# ---------------------------------------------------------------- pad


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pad every rank's tensors to the longest rank's size along one dimension.

    Args:
        tensor: any nesting of tensors. One that has no such dimension is returned as it is.
        dim: which one; negative counts from the end.
        pad_index: the value to pad with.
        pad_first: pad in front.

    Raises:
        TypeError: a leaf that is not a tensor; names its place.
        CollectiveMismatchError: the ranks' data differ, or one did not come.

    Cost: an exchange of slots; the data itself does not travel.
    """
    channel = _channel()
    if channel is None:
        return tensor
    leaves, text = _flatten(channel, tensor, f"pad_across_processes (dim={dim}) of", layout.rank_only)
    sizes = [leaf.shape[dim] if _has_dim(leaf, dim) else 0 for leaf in leaves]
    replies = channel.exchange(channel.begin(text), struct.pack(f"{len(leaves)}q", *sizes))
    by_rank = [struct.unpack(f"{len(leaves)}q", head) for head in replies.heads]
    longest = [max(one) for one in zip(*by_rank, strict=True)]
    padded = [_pad(leaf, dim, size, pad_index, pad_first) for leaf, size in zip(leaves, longest, strict=True)]
    return _with_leaves(tensor, padded)


def _has_dim(leaf: torch.Tensor, dim: int) -> bool:
    return -leaf.ndim <= dim < leaf.ndim


def _pad(leaf: torch.Tensor, dim: int, size: int, pad_index: int, pad_first: bool) -> torch.Tensor:
    if not _has_dim(leaf, dim) or leaf.shape[dim] == size:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = size
    padded = leaf.new_full(shape, pad_index)
    start = size - leaf.shape[dim] if pad_first else 0
    padded.narrow(dim, start, leaf.shape[dim]).copy_(leaf)
    return padded


# ---------------------------------------------------------------- shared


def _flatten(
    channel: Channel, tree: Any, operation: str, shape: Callable[[torch.Tensor], str]
) -> tuple[list[torch.Tensor], str]:
    """As `layout.flatten`; data that cannot be sent raises on the other ranks too, rather than let them wait."""
    try:
        return layout.flatten(tree, operation, shape)
    except TypeError as error:
        channel.report_failure(operation, error)
        raise


def _by_device(leaves: Sequence[torch.Tensor]) -> dict[torch.device, list[int]]:
    """The indices of the tensors of each device."""
    by_device: dict[torch.device, list[int]] = {}
    for index, leaf in enumerate(leaves):
        by_device.setdefault(leaf.device, []).append(index)
    return by_device


def _with_leaves(tree: Any, values: Sequence[torch.Tensor]) -> Any:
    remaining = iter(values)
    return map_leaves(lambda _leaf: next(remaining), tree)


def _item_bytes(leaf: torch.Tensor) -> int:
    """Bytes of one row of the first dimension."""
    return leaf.shape[1:].numel() * leaf.element_size()


def _padded_bytes(leaf: torch.Tensor, size: int | None = None) -> int:
    num_bytes = leaf.numel() * leaf.element_size() if size is None else size * _item_bytes(leaf)
    return num_bytes + padding(num_bytes)
