"""Tensors as bytes, one after the other in a message, each at an aligned offset.

On the CPU bytes are moved by address: a tree of many small tensors costs a microsecond per tensor, where views and
copies by torch would cost ten. Tensors on a device are joined by torch, which does not wait for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

ALIGNMENT = 16  # bytes: complex128, the widest dtype, needs it for a view

_move = ctypes.memmove


def padding(num_bytes: int) -> int:
    """Bytes to the next aligned offset."""
    return -num_bytes % ALIGNMENT


def item_bytes(leaf: torch.Tensor) -> int:
    """Bytes of one row of the first dimension."""
    return leaf.shape[1:].numel() * leaf.itemsize


def padded_bytes(leaves: Sequence[torch.Tensor]) -> int:
    """How long a message of them is."""
    total = 0
    for leaf in leaves:
        total += leaf.nbytes
        total += -total % ALIGNMENT
    return total


def padded_bytes_of(leaves: Sequence[torch.Tensor], sizes: Sequence[int]) -> int:
    """As `padded_bytes`, had the leaves these first dimensions."""
    total = 0
    for leaf, size in zip(leaves, sizes, strict=True):
        total += item_bytes(leaf) * size
        total += -total % ALIGNMENT
    return total


def as_plain(leaf: torch.Tensor) -> torch.Tensor:
    """Itself where its bytes lie in order, else a copy of which they do."""
    if leaf.is_conj() or leaf.is_neg():
        leaf = leaf.resolve_conj().resolve_neg()
    return leaf if leaf.is_contiguous() else leaf.contiguous()


def as_bytes(leaf: torch.Tensor) -> torch.Tensor:
    """A dense tensor as flat uint8, without a copy where it is contiguous."""
    plain = as_plain(leaf.detach())
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # a single item may have any stride


def write(leaves: Sequence[torch.Tensor], address: int) -> None:
    """Put tensors of the CPU (see `as_plain`) to an aligned address; there is room for `padded_bytes` of them."""
    for leaf in leaves:
        num_bytes = leaf.nbytes
        if num_bytes:
            _move(address, leaf.data_ptr(), num_bytes)
            address += num_bytes + -num_bytes % ALIGNMENT


def as_message(leaves: Sequence[torch.Tensor], num_bytes: int) -> torch.Tensor:
    """Flat uint8 of that length, with the leaves (of one device) in front; a single one as long as that is not copied.

    Args:
        leaves: on the CPU see `as_plain`.
        num_bytes: at least `padded_bytes` of them.
    """
    if len(leaves) == 1 and leaves[0].nbytes == num_bytes:
        return as_bytes(leaves[0])
    if not leaves or leaves[0].device.type == "cpu":
        message = torch.empty(num_bytes, dtype=torch.uint8)
        write(leaves, message.data_ptr())
        return message
    pieces, at = [], 0
    for leaf in leaves:
        pieces.append(as_bytes(leaf))
        at += leaf.nbytes
        if padding(at):
            pieces.append(pieces[-1].new_empty(padding(at)))
            at += padding(at)
    return torch.cat([*pieces, pieces[-1].new_empty(num_bytes - at)])


def join(
    like: Sequence[torch.Tensor], rows: torch.Tensor, sizes_by_rank: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Per tensor, all ranks' parts in one, along the first dimension.

    Args:
        like: this rank's tensors, of one device.
        rows: `[world_size, n]` uint8, each rank's message.
        sizes_by_rank: first dimensions, per rank and tensor.
    """
    if rows.device.type == "cpu":
        return _join_by_address(like, rows, sizes_by_rank)
    parts: list[list[torch.Tensor]] = [[] for _ in like]
    for row, sizes in zip(rows, sizes_by_rank, strict=True):
        at = 0
        for index, (leaf, size) in enumerate(zip(like, sizes, strict=True)):
            num_bytes = size * item_bytes(leaf)
            parts[index].append(row[at : at + num_bytes].view(leaf.dtype).view(size, *leaf.shape[1:]))
            at += num_bytes + padding(num_bytes)
    return [torch.cat(one) for one in parts]


def _join_by_address(
    like: Sequence[torch.Tensor], rows: torch.Tensor, sizes_by_rank: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    start, step = rows.data_ptr(), rows.stride(0)
    sources = [start + rank * step for rank in range(len(sizes_by_rank))]
    joined = []
    for leaf, sizes in zip(like, zip(*sizes_by_rank, strict=True), strict=True):
        tail = leaf.shape[1:]
        per_item = tail.numel() * leaf.itemsize
        whole = torch.empty((sum(sizes), *tail), dtype=leaf.dtype)
        at = whole.data_ptr()
        for rank, size in enumerate(sizes):
            num_bytes = size * per_item
            if num_bytes:
                _move(at, sources[rank], num_bytes)
                at += num_bytes
                sources[rank] += num_bytes + -num_bytes % ALIGNMENT
        joined.append(whole)
    return joined


def columns(like: Sequence[torch.Tensor], rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Per tensor, `[world_size, numel]` of its dtype: a view of the rows of bytes."""
    at = 0
    for leaf in like:
        num_bytes = leaf.nbytes
        if num_bytes:
            yield rows[:, at : at + num_bytes].view(leaf.dtype)
        else:
            yield rows.new_empty((rows.shape[0], 0), dtype=leaf.dtype)
        at += num_bytes + padding(num_bytes)
