"""Tensors that are not plain dense ones, in `gather`: sparse ones travel in parts, DTensors are put together by torch.

Legend: N items in the first dimension, E stored elements, S sparse dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from accel_state.collectives.layout import any_first, is_dtensor, is_plain, leaf_text


def describe(leaf: torch.Tensor) -> str | None:
    """A text for a sparse (COO) tensor or a DTensor over all ranks; None for what gather cannot take."""
    if is_dtensor(leaf):
        mesh = leaf.device_mesh  # type: ignore[attr-defined]
        is_over_all = mesh.size() == dist.get_world_size()
        text = leaf_text(leaf.dtype, tuple(leaf.shape), leaf.device.type)
        return f"DTensor {text} as {leaf.placements}" if is_over_all else None  # type: ignore[attr-defined]
    if leaf.layout is torch.sparse_coo and leaf.sparse_dim() > 0:
        text = leaf_text(leaf.dtype, any_first(leaf.shape), leaf.device.type)
        return f"sparse {text} ({leaf.sparse_dim()} sparse dimensions)"
    return None


def nested(leaf: torch.Tensor) -> str | None:
    """A text for a nested tensor, which padding leaves alone; None for others."""
    return f"nested {leaf.dtype}" if leaf.is_nested else None


def parts(leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The plain tensors that travel for these."""
    if all(is_plain(leaf) for leaf in leaves):
        return leaves
    return [part for leaf in leaves for part in _parts(leaf)]


def put_together(leaves: Sequence[torch.Tensor], gathered: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What `gather` returns for `leaves`, from what it gathered for `parts(leaves)`.

    Cost: for each DTensor torch's own all-gather on its mesh.
    """
    if all(is_plain(leaf) for leaf in leaves):
        return gathered
    remaining = iter(gathered)
    return [_put_together(leaf, remaining) for leaf in leaves]


def _parts(leaf: torch.Tensor) -> list[torch.Tensor]:
    if is_plain(leaf):
        return [leaf]
    if is_dtensor(leaf):
        return []
    leaf = leaf.detach().coalesce()
    counts = torch.tensor([[leaf.shape[0], leaf.values().shape[0]]])
    return [counts, leaf.indices().t(), leaf.values()]


def _put_together(leaf: torch.Tensor, remaining: Iterator[torch.Tensor]) -> torch.Tensor:
    if is_plain(leaf):
        return next(remaining)
    if is_dtensor(leaf):
        return leaf.full_tensor()  # type: ignore[attr-defined, no-any-return]
    counts, places_ES, values = (next(remaining) for _ in range(3))  # noqa: N806
    num_items, num_elements = counts.T.tolist()
    starts = [sum(num_items[:rank]) for rank in range(len(num_items))]
    shifts_E = torch.tensor(starts).repeat_interleave(torch.tensor(num_elements))  # noqa: N806
    places_ES[:, 0] += shifts_E.to(places_ES.device)
    shape = (sum(num_items), *leaf.shape[1:])
    return torch.sparse_coo_tensor(places_ES.t(), values, shape, is_coalesced=True)
