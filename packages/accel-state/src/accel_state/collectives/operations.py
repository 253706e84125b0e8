"""Collectives over nested tensors: gather, broadcast, reduce, pad.

Each begins with an exchange of slots (`channel.py`): ranks that do not fit together raise, all of them. What is small
and on the CPU has then arrived already; the rest follows as one message of bytes per kind of device.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accel_state.collectives import layout
from accel_state.collectives.callsite import call_site
from accel_state.collectives.channel import Call, Channel
from accel_state.collectives.layout import as_bytes, from_bytes, padding
from accel_state.collectives.trees import map_leaves

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
        channel.exchange("wait_for_everyone")


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
    on_cpu = [leaf for leaf in leaves if leaf.device.type == "cpu"]
    sizes = torch.tensor([leaf.shape[0] for leaf in leaves], dtype=torch.int64)
    head = _aligned([as_bytes(sizes)])
    payload = _aligned([as_bytes(leaf) for leaf in on_cpu])
    is_inline = _total(head) + _total(payload) <= channel.capacity
    bodies = channel.exchange(text, [*head, *payload] if is_inline else head)
    all_sizes = [from_bytes(body[: 8 * len(leaves)], torch.int64, [len(leaves)]).tolist() for body in bodies]
    call = Call(text, call_site())
    gathered: dict[int, torch.Tensor] = {}
    for device in dict.fromkeys(leaf.device for leaf in leaves):
        indices = [index for index, leaf in enumerate(leaves) if leaf.device == device]
        mine = [leaves[index] for index in indices]
        lengths = [sum(_padded_bytes(leaves[i], sizes_of[i]) for i in indices) for sizes_of in all_sizes]
        if device.type == "cpu" and _all_inline(bodies, _total(head), lengths):
            rows = [body[_total(head) :] for body in bodies]
        else:
            rows = _send(channel, mine, lengths, call)
        joined = _join(mine, rows, [[sizes_of[i] for i in indices] for sizes_of in all_sizes])
        gathered.update(zip(indices, joined, strict=True))
    return _with_leaves(tensor, [gathered[index] for index in range(len(leaves))])


def _all_inline(bodies: Sequence[torch.Tensor], head: int, lengths: Sequence[int]) -> bool:
    return all(body.numel() == head + length for body, length in zip(bodies, lengths, strict=True))


def _send(channel: Channel, mine: Sequence[torch.Tensor], lengths: Sequence[int], call: Call) -> list[torch.Tensor]:
    """Each rank's bytes of the tensors of one device, by one all-gather of the longest."""
    longest = max(lengths)
    parts = _aligned([as_bytes(leaf) for leaf in mine])
    missing = longest - _total(parts)
    if missing:
        parts.append(parts[0].new_empty(missing))
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    everyone = channel.all_gather_bytes(flat, call)
    return [row[:length] for row, length in zip(everyone, lengths, strict=True)]


def _join(
    mine: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], all_sizes: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Per tensor, the ranks' parts in one."""
    parts: list[list[torch.Tensor]] = [[] for _ in mine]
    for row, sizes in zip(rows, all_sizes, strict=True):
        at = 0
        for index, (leaf, size) in enumerate(zip(mine, sizes, strict=True)):
            num_bytes = size * _item_bytes(leaf)
            parts[index].append(from_bytes(row[at : at + num_bytes], leaf.dtype, (size, *leaf.shape[1:])))
            at += num_bytes + padding(num_bytes)
    return [torch.cat(one) for one in parts]


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
    on_cpu = [leaf for leaf in leaves if leaf.device.type == "cpu"]
    is_source = channel.rank == from_process
    payload = _aligned([as_bytes(leaf) for leaf in on_cpu]) if is_source else []
    row = channel.exchange(text, payload, from_process)[from_process]
    call = Call(text, call_site())
    received: dict[int, torch.Tensor] = {}
    for device in dict.fromkeys(leaf.device for leaf in leaves):
        indices = [index for index, leaf in enumerate(leaves) if leaf.device == device]
        mine = [leaves[index] for index in indices]
        if device.type != "cpu":
            parts = _aligned([as_bytes(leaf) for leaf in mine])
            row = torch.cat(parts)
            channel.broadcast_bytes(row, from_process, call)
        received.update(zip(indices, _split(mine, row), strict=True))
    return _with_leaves(tensor, [received[index] for index in range(len(leaves))])


def _split(like: Sequence[torch.Tensor], row: torch.Tensor) -> list[torch.Tensor]:
    values, at = [], 0
    for leaf in like:
        num_bytes = leaf.numel() * leaf.element_size()
        values.append(from_bytes(row[at : at + num_bytes], leaf.dtype, leaf.shape).clone())
        at += num_bytes + padding(num_bytes)
    return values


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of a list, in place, by those of one rank; pickled on the way. Returns the list."""
    channel = _channel()
    if channel is not None:
        text = f"broadcast_object_list from rank {from_process} of {len(object_list)} objects"
        _check_rank(channel, from_process, text)
        object_list[:] = channel.broadcast_object(text, list(object_list), from_process)
    return object_list


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
    is_small = (
        all(leaf.device.type == "cpu" for leaf in leaves)
        and sum(_padded_bytes(leaf) for leaf in leaves) <= channel.capacity
    )
    bodies = channel.exchange(text, _aligned([as_bytes(leaf) for leaf in leaves]) if is_small else ())
    call = Call(text, call_site())
    totals = _reduce_rows(leaves, bodies, reduction) if is_small else _all_reduce(channel, leaves, reduction, call)
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


def _reduce_rows(leaves: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], reduction: str) -> list[torch.Tensor]:
    """In the order of the ranks, so that all of them get the same bits."""
    by_rank = [_split(leaves, row) for row in rows]
    totals = []
    for parts in zip(*by_rank, strict=True):
        stacked = torch.stack(parts)
        totals.append(stacked.amax(0) if reduction == "max" else stacked.sum(0, dtype=stacked.dtype))
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
    sizes = torch.tensor([leaf.shape[dim] if _has_dim(leaf, dim) else 0 for leaf in leaves], dtype=torch.int64)
    bodies = channel.exchange(text, [as_bytes(sizes)])
    longest = torch.stack([body.view(torch.int64) for body in bodies]).amax(0).tolist()
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


def _with_leaves(tree: Any, values: Sequence[torch.Tensor]) -> Any:
    remaining = iter(values)
    return map_leaves(lambda _leaf: next(remaining), tree)


def _item_bytes(leaf: torch.Tensor) -> int:
    """Bytes of one row of the first dimension."""
    return leaf.shape[1:].numel() * leaf.element_size()


def _padded_bytes(leaf: torch.Tensor, size: int | None = None) -> int:
    num_bytes = leaf.numel() * leaf.element_size() if size is None else size * _item_bytes(leaf)
    return num_bytes + padding(num_bytes)


def _aligned(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts with filling after each, so that every one begins at an aligned offset."""
    aligned = []
    for part in parts:
        aligned.append(part)
        if padding(part.numel()):
            aligned.append(part.new_empty(padding(part.numel())))
    return aligned


def _total(parts: Sequence[torch.Tensor]) -> int:
    return sum(part.numel() for part in parts)
