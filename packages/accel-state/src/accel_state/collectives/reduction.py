"""`reduce`: sum, mean and maximum over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from accel_state import process_group
from accel_state.callsite import warn_user
from accel_state.collectives import layout
from accel_state.collectives.call import Call
from accel_state.collectives.channel import Channel
from accel_state.collectives.packing import as_plain, columns, padded_bytes
from accel_state.collectives.shared import current_channel, flatten, with_leaves

REDUCTIONS = ("sum", "mean", "max", "none")


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0, *, uniform: bool = False) -> Any:
    """Sum, mean or maximum over the ranks, element by element; the inputs stay as they are.

    Args:
        tensor: any nesting of tensors, of the same layout and shapes on all ranks.
        reduction: `sum`, `mean` (of integers: floating point), `max`, or `none`, which returns the values untouched.
            fp16 and bf16 are added in fp32 and come back as they went in; fp8 comes back as fp32.
        scale: multiplies on XLA only; elsewhere another value than 1 warns once.
        uniform: as of `gather`: the check that all ranks come with the same is saved.

    Raises:
        ValueError: another word for `reduction`.
        TypeError: a leaf that is not a tensor; names its place.
        CollectiveMismatchError: the ranks' data differ, or one did not come or failed as above.

    Cost: an exchange of slots, without `uniform`; beyond 8 KB, and for tensors on a device, one all-reduce per dtype
    and device.
    """
    channel = current_channel()
    with nullcontext() if channel is None else channel.told_to_others("reduce"):
        _check(reduction, scale)
    if channel is None or reduction == "none":
        return tensor
    leaves, text = flatten(channel, tensor, f"reduce ({reduction}) of", layout.whole)
    dtypes = [leaf.dtype for leaf in leaves]
    with channel.told_to_others("reduce"):
        leaves = [as_plain(_summable(leaf.detach(), reduction)) for leaf in leaves]
    is_small = not uniform and all(leaf.is_cpu for leaf in leaves) and channel.fits(0, padded_bytes(leaves))
    with channel.begin(text) as call:
        if is_small:
            totals = _reduce_rows(leaves, channel.exchange(call, body=leaves).bodies, reduction)
        else:
            if not uniform:
                channel.exchange(call)
            totals = _all_reduce(channel, leaves, reduction, call)
    size = channel.world_size
    totals = [_finished(total, dtype, reduction, size) for total, dtype in zip(totals, dtypes, strict=True)]
    return with_leaves(tensor, totals)


def _check(reduction: str, scale: float) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is not known; allowed are {', '.join(REDUCTIONS)}")
    if scale != 1.0:
        _warn_scale(scale)


@functools.cache
def _warn_scale(scale: float) -> None:
    if process_group.current_job().kind.name != "xla":
        warn_user(f"scale={scale} of reduce has an effect on XLA only")


_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}  # gloo knows no such numbers
_HALVES = (torch.float16, torch.bfloat16)


def _summable(leaf: torch.Tensor, reduction: str) -> torch.Tensor:
    """The leaf in a type that can be reduced.

    Truth values are counted, means of integers taken in float64, halves and 8-bit floats added in float32, and integers
    that backends do not know in wider ones.

    Raises:
        TypeError: values that have no maximum, or whose sum torch cannot compute.
    """
    if leaf.is_complex() and reduction == "max":
        raise TypeError(f"reduce got a tensor of {leaf.dtype}: complex numbers have no maximum")
    if leaf.dtype == torch.uint64:
        raise TypeError("reduce got a tensor of torch.uint64, which torch cannot add up: convert it to torch.int64")
    if leaf.is_floating_point():
        is_narrow = leaf.element_size() == 1 or (leaf.dtype in _HALVES and reduction != "max")
        return leaf.float() if is_narrow else leaf
    if reduction == "mean" and not leaf.is_complex():
        return leaf.double()
    if leaf.dtype == torch.bool and reduction != "max":
        return leaf.to(torch.int64)
    return leaf.to(_WIDER.get(leaf.dtype, leaf.dtype))


def _finished(total: torch.Tensor, dtype: torch.dtype, reduction: str, world_size: int) -> torch.Tensor:
    """A leaf's result from its total over the ranks, in the type that the caller expects."""
    if reduction == "mean":
        total = total / world_size
        if not (dtype.is_floating_point or dtype.is_complex):
            return total.to(torch.get_default_dtype())
    return total.to(dtype) if dtype in _HALVES or dtype in _WIDER else total


def _reduce_rows(leaves: Sequence[torch.Tensor], rows: torch.Tensor, reduction: str) -> list[torch.Tensor]:
    """Here, from what all ranks sent: the same bits on all of them."""
    totals = []
    for leaf, column in zip(leaves, columns(leaves, rows), strict=True):
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
