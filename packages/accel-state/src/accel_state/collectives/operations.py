"""Collectives over nested tensors: gather, broadcast, pad. `reduce` is in `reduction.py`.

Each begins with an exchange of slots (`channel.py`): ranks that do not fit together raise, all of them. What is small
and on the CPU has then arrived already; the rest follows as one message of bytes per kind of device.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Sequence
from typing import Any

import torch

from accel_state import process_group
from accel_state.callsite import warn_user
from accel_state.collectives import layout, special
from accel_state.collectives.call import Call
from accel_state.collectives.channel import Channel
from accel_state.collectives.packing import (
    as_bytes,
    as_message,
    as_plain,
    columns,
    join,
    padded_bytes,
    padded_bytes_of,
)
from accel_state.collectives.shared import by_device, current_channel, flatten, with_leaves
from accel_state.errors import CannotPadNestedTensorWarning

_CPU = torch.device("cpu")
_SENT_AS_THEY_ARE = frozenset(  # what every backend knows; the rest travels as bytes
    {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8}
)


def wait_for_everyone() -> None:
    """Return when every rank is here. One exchange of slots on the CPU; does not wait for devices."""
    channel = current_channel()
    if channel is not None:
        with channel.begin("wait_for_everyone") as call:
            channel.exchange(call)


def any_rank(is_so: bool) -> bool:
    """Whether it is so on at least one rank. One exchange of slots on the CPU; does not wait for devices."""
    channel = current_channel()
    if channel is None:
        return is_so
    with channel.begin("any_rank") as call:
        return b"\1" in channel.exchange(call, bytes([is_so])).heads


# ---------------------------------------------------------------- gather


def gather(tensor: Any, *, uniform: bool = False) -> Any:
    """All ranks' tensors, one after the other along the first dimension, on every rank.

    Args:
        tensor: any nesting of tensors; first dimensions may differ between ranks, all else may not. A tensor without
            dimensions counts as one item. Sparse ones (COO) are gathered sparse. A DTensor over all ranks is one
            tensor already, and comes back whole.
        uniform: the caller knows that all ranks come with tensors of the same shapes, and saves the check: ranks that
            do not are not told apart from each other, and get garbage, an error when the time-out is over, or are ended
            by gloo, which takes data of a wrong size for a broken program.

    Raises:
        TypeError: a leaf that is not a tensor, or one that cannot be sent; names its place.
        CollectiveMismatchError: the ranks' data differ, or one did not come.

    Cost: an exchange of slots, without `uniform`; beyond 8 KB, and for tensors on a device, one all-gather per kind
    of device, of the longest rank's bytes. No device is waited for.
    """
    channel = current_channel()
    if channel is None:
        return tensor
    if type(tensor) is torch.Tensor and tensor.ndim and layout.is_plain(tensor):
        return _gather_one(channel, as_plain(tensor), uniform)
    leaves, text = flatten(channel, tensor, "gather", layout.any_first, special.describe)
    parts = special.parts(leaves)
    parts = [as_plain(leaf.reshape(1) if leaf.ndim == 0 else leaf) for leaf in parts]
    with channel.begin(text) as call:
        gathered = _gather_uniform(channel, parts, call) if uniform else _gather_checked(channel, parts, call)
    return with_leaves(tensor, special.put_together(leaves, gathered))


def _gather_one(channel: Channel, leaf: torch.Tensor, uniform: bool) -> torch.Tensor:
    """A single tensor, the usual case, with as few steps as it needs."""
    if uniform:
        with channel.begin("gather(uniform=True)") as call:
            return _gather_same(channel, leaf, call)
    text = layout.leaf_text(leaf.dtype, layout.any_first(leaf.shape), leaf.device.type)
    with channel.begin(f"gather {text}") as call:
        return _gather_checked(channel, [leaf], call)[0]


def _gather_checked(channel: Channel, leaves: Sequence[torch.Tensor], call: Call) -> list[torch.Tensor]:
    layout_of_sizes = _integers(len(leaves))
    head = layout_of_sizes.pack(*[leaf.shape[0] for leaf in leaves])
    on_cpu = [leaf for leaf in leaves if leaf.is_cpu]
    is_inline = channel.fits(len(head), padded_bytes(on_cpu))
    replies = channel.exchange(call, head, on_cpu if is_inline else ())
    sizes_by_rank = [layout_of_sizes.unpack(one) for one in replies.heads]
    if is_inline and len(on_cpu) == len(leaves) and layout.same_everywhere(sizes_by_rank):  # most calls
        return join(leaves, replies.bodies, sizes_by_rank)
    gathered: dict[int, torch.Tensor] = {}
    for device, indices in by_device(leaves).items():
        mine = [leaves[index] for index in indices]
        sizes = [[of_rank[index] for index in indices] for of_rank in sizes_by_rank]
        if layout.same_everywhere(sizes):
            lengths = [padded_bytes(mine)] * len(sizes)
        else:
            lengths = [padded_bytes_of(mine, of_rank) for of_rank in sizes]
        if device == _CPU and all(channel.fits(len(head), length) for length in lengths):
            parts = join(mine, replies.bodies, sizes)
        else:
            parts = _gather_message(channel, mine, sizes, lengths, call)
        gathered.update(zip(indices, parts, strict=True))
    return [gathered[index] for index in range(len(leaves))]


@functools.lru_cache(maxsize=256)
def _integers(count: int) -> struct.Struct:
    return struct.Struct(f"{count}q")


def _gather_uniform(channel: Channel, leaves: Sequence[torch.Tensor], call: Call) -> list[torch.Tensor]:
    gathered: dict[int, torch.Tensor] = {}
    for indices in by_device(leaves).values():
        mine = [leaves[index] for index in indices]
        sizes = [[leaf.shape[0] for leaf in mine]] * channel.world_size
        lengths = [padded_bytes(mine)] * channel.world_size
        gathered.update(zip(indices, _gather_message(channel, mine, sizes, lengths, call), strict=True))
    return [gathered[index] for index in range(len(leaves))]


def _gather_message(
    channel: Channel,
    mine: Sequence[torch.Tensor],
    sizes: Sequence[Sequence[int]],
    lengths: Sequence[int],
    call: Call,
) -> list[torch.Tensor]:
    """Gather the tensors of one device; a single one that is equally long everywhere is never copied.

    Args:
        sizes: first dimensions, per rank and tensor.
        lengths: of each rank's message, in bytes.
    """
    if len(mine) == 1 and layout.same_everywhere(sizes):
        return [_gather_same(channel, mine[0], call)]
    return join(mine, channel.all_gather_bytes(as_message(mine, max(lengths)), call), sizes)


def _gather_same(channel: Channel, leaf: torch.Tensor, call: Call) -> torch.Tensor:
    """Gather a tensor that has one shape everywhere; nothing is copied."""
    whole = torch.empty((channel.world_size * leaf.shape[0], *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)
    if leaf.dtype in _SENT_AS_THEY_ARE:
        channel.all_gather_into(whole, leaf, call)
    else:
        channel.all_gather_into(as_bytes(whole), as_bytes(leaf), call)
    return whole


def gather_object(object: Any) -> list[Any]:  # noqa: A002  (the peer's name)
    """All ranks' objects on every rank; pickled on the way.

    Args:
        object: a list or tuple, whose items are joined to one list; anything else counts as one item. (The peer takes
            texts apart into characters and dicts into keys.)

    Raises:
        Exception: of pickle, for an object that it cannot take.
        CollectiveMismatchError: a rank did not come, called something else, or has an object that cannot be pickled.

    Cost: an exchange of slots; beyond 8 KB an all-gather of the longest rank's pickle.
    """
    channel = current_channel()
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
        ValueError: there is no rank `from_process`.
        CollectiveMismatchError: the ranks' data differ, or one did not come or failed as above.

    Cost: an exchange of slots; beyond 8 KB, and for tensors on a device, one broadcast per kind of device.
    """
    channel = current_channel()
    if channel is None:
        return tensor
    from_process = _source(channel, from_process, "broadcast")
    leaves, text = flatten(channel, tensor, f"broadcast from rank {from_process} of", layout.whole)
    indices_by_device = by_device(leaves)
    is_source = channel.rank == from_process
    on_cpu = [as_plain(leaves[index]) for index in indices_by_device.get(_CPU, ())] if is_source else []
    received: dict[int, torch.Tensor] = {}
    with channel.begin(text) as call:
        rows = channel.exchange(call, body=on_cpu, source=from_process).bodies
        for device, indices in indices_by_device.items():
            mine = [leaves[index] for index in indices]
            row = rows[from_process]
            if device != _CPU:
                row = as_message(mine, padded_bytes(mine))
                row = row.clone() if len(mine) == 1 else row  # the message of a single tensor may be that tensor
                channel.broadcast_bytes(row, from_process, call)
            parts = zip(columns(mine, row[None]), mine, strict=True)
            received.update(zip(indices, (part.view(leaf.shape).clone() for part, leaf in parts), strict=True))
    return with_leaves(tensor, [received[index] for index in range(len(leaves))])


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of a list, in place, by those of one rank; pickled on the way. Returns the list.

    Raises:
        TypeError: not a list, or objects that cannot be pickled.
        ValueError: there is no rank `from_process`.
        CollectiveMismatchError: the ranks' lists differ in length, or one did not come or failed as above.
    """
    channel = current_channel()
    if channel is None:
        return object_list
    from_process = _source(channel, from_process, "broadcast_object_list")
    with channel.told_to_others("broadcast_object_list"):
        if not isinstance(object_list, list):
            raise TypeError(
                f"broadcast_object_list replaces the items of a list in place, and got a {type(object_list).__name__}: "
                "give a list, such as [value]"
            )
    text = f"broadcast_object_list from rank {from_process} of {len(object_list)} objects"
    object_list[:] = channel.broadcast_object(text, object_list, from_process)
    return object_list


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Rank 0's tensor on every rank's device; the others give nothing.

    Args:
        tensor: on rank 0, of any shape.

    Raises:
        ValueError: rank 0 gives none.
    """
    job, channel = process_group.current_job(), current_channel()
    if channel is not None:
        with channel.told_to_others("copy_tensor_to_devices"):
            on_cpu = None if tensor is None else tensor.cpu()
        tensor = channel.broadcast_object("copy_tensor_to_devices", on_cpu, 0)
    if tensor is None:
        raise ValueError("copy_tensor_to_devices: rank 0 has to give a tensor, and it gave None")
    return tensor.to(job.device)


def _source(channel: Channel, rank: Any, operation: str) -> int:
    """The rank whose values are sent, checked."""
    with channel.told_to_others(operation):
        if not hasattr(rank, "__index__"):
            raise TypeError(f"{operation}: from_process={rank!r} is not the number of a rank")
        if not 0 <= rank < channel.world_size:
            raise ValueError(
                f"{operation}: from_process={rank} is no such rank; allowed are 0 to {channel.world_size - 1}"
            )
    return operator.index(rank)


# ---------------------------------------------------------------- pad


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pad every rank's tensors to the longest rank's size along one dimension.

    Args:
        tensor: any nesting of tensors. One that has no such dimension is returned as it is, and so is, with a
            `CannotPadNestedTensorWarning`, a nested one.
        dim: which one; negative counts from the end.
        pad_index: the value to pad with.
        pad_first: pad in front.

    Raises:
        TypeError: a leaf that is not a tensor; names its place.
        CollectiveMismatchError: the ranks' data differ, or one did not come.

    Cost: an exchange of slots; the data itself does not travel.
    """
    channel = current_channel()
    if channel is None:
        return tensor
    with channel.told_to_others("pad_across_processes"):
        dim = operator.index(dim)
    operation = f"pad_across_processes (dim={dim}) of"
    leaves, text = flatten(channel, tensor, operation, layout.rank_only, special.nested)
    if any(leaf.is_nested for leaf in leaves):
        warn_user(
            "pad_across_processes: a nested tensor has no one length to pad to and is returned as it is; "
            "use .to_padded_tensor(...) of it first",
            CannotPadNestedTensorWarning,
        )
    sizes = [leaf.shape[dim] if _has_dim(leaf, dim) else 0 for leaf in leaves]
    with channel.begin(text) as call:
        replies = channel.exchange(call, struct.pack(f"{len(leaves)}q", *sizes))
    by_rank = [struct.unpack(f"{len(leaves)}q", head) for head in replies.heads]
    longest = [max(one) for one in zip(*by_rank, strict=True)]
    padded = [_pad(leaf, dim, size, pad_index, pad_first) for leaf, size in zip(leaves, longest, strict=True)]
    return with_leaves(tensor, padded)


def _has_dim(leaf: torch.Tensor, dim: int) -> bool:
    return not leaf.is_nested and -leaf.ndim <= dim < leaf.ndim


def _pad(leaf: torch.Tensor, dim: int, size: int, pad_index: int, pad_first: bool) -> torch.Tensor:
    if not _has_dim(leaf, dim) or leaf.shape[dim] == size:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = size
    padded = leaf.new_full(shape, pad_index)
    start = size - leaf.shape[dim] if pad_first else 0
    padded.narrow(dim, start, leaf.shape[dim]).copy_(leaf)
    return padded
