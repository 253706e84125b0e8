"""Objects of which each rank holds a part, by name (stages of a pipeline): told to the others, and put together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accel_state.errors import CheckpointError

from . import models, optimizers
from .objects import Captured
from .tensors import DTYPES, dtype_name


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a rank tells of its part of an object; the fields of `Captured` without memory.

    Args:
        bulk, side: key -> dtype and whole shape.
    """

    tree: Any
    bulk: Mapping[str, tuple[str, tuple[int, ...]]]
    side: Mapping[str, tuple[str, tuple[int, ...]]]
    aliases: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    own: Collection[str]


def parts_of(objects: Mapping[str, Captured]) -> dict[str, Part]:
    """What this rank has to tell; empty where every rank has all of everything."""
    return {
        name: Part(
            tree=captured.tree,
            bulk=_described(captured.bulk),
            side=_described(captured.side),
            aliases=captured.aliases,
            shapes=captured.shapes,
            own=tuple(captured.own),
        )
        for name, captured in objects.items()
        if captured.is_part
    }


def _described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {key: (dtype_name(tensor), tuple(tensor.shape)) for key, tensor in tensors.items()}


def put_together(objects: Mapping[str, Captured], told: Mapping[int, Mapping[str, Part]]) -> dict[str, Captured]:
    """The objects as a whole: with the tensors of other ranks, on the meta device, beside this rank's own.

    Args:
        objects: what this rank captured.
        told: of each rank that writes this checkpoint, by rank.

    Raises:
        CheckpointError: parts that do not fit together, or do not make up the whole.
    """
    for name in {name for parts in told.values() for name in parts}:
        if absent := [rank for rank, parts in told.items() if name not in parts]:
            raise CheckpointError(
                f"{name} is left out by rank {_listed(absent)} alone: all ranks save their parts of it, or none does"
            )
    return {
        name: _joined(name, captured, [told[rank][name] for rank in sorted(told)]) if captured.is_part else captured
        for name, captured in objects.items()
    }


def _joined(name: str, own: Captured, parts: Sequence[Part]) -> Captured:
    assert own.whole is not None
    trees = [part.tree for part in parts]
    joined = replace(
        own,
        tree=models.join_trees(trees) if own.kind == "model" else optimizers.join_trees(trees, own.whole),
        bulk=_with_others(name, own.bulk, [part.bulk for part in parts], own.whole),
        side=_with_others(name, own.side, [part.side for part in parts], ()),
        aliases={alias: first for part in parts for alias, first in part.aliases.items()},
        shapes={key: shape for part in parts for key, shape in part.shapes.items()},
        own={key for part in parts for key in part.own},
    )
    if tied := sorted(joined.aliases.keys() & joined.bulk.keys()):
        raise CheckpointError(f"{name}: {_listed(tied)}: tied to another weight on one rank, and not on another")
    if own.kind == "model" and own.whole:
        there = {*joined.bulk, *joined.aliases, *joined.tree["extra"]}
        if missing := [key for key in own.whole if key not in there]:
            raise CheckpointError(
                f"{name}: no rank has {_listed(missing)}. Stages keep all that the model has between them; with "
                "save_on_each_node each node needs all of it: keep pipelines within nodes, or save to a common file "
                "system."
            )
    return joined


def _with_others(
    name: str,
    own: Mapping[str, Tensor],
    described: Sequence[Mapping[str, tuple[str, tuple[int, ...]]]],
    order: Sequence[str],
) -> dict[str, Tensor]:
    """This rank's tensors and stand-ins for those of the others, in the given order."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensors in described:
        for key, what in tensors.items():
            if found.setdefault(key, what) != what:
                raise CheckpointError(f"{name}: {key} is {found[key]} on one rank, {what} on another")
    place = {key: number for number, key in enumerate(order)}
    return {
        key: own[key] if key in own else torch.empty(shape, dtype=DTYPES[dtype], device="meta")
        for key, (dtype, shape) in sorted(found.items(), key=lambda item: place.get(item[0], len(place)))
    }


def _listed(items: Iterable[Any]) -> str:
    shown = [str(item) for item in items]
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
