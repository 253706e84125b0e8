"""Arithmetic over the sizes of a mesh's axes: which plan fits, and who is where."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
"""The axes of a mesh, slowest first: ranks that are next to each other share matrices."""

DATA_AXES = ("dp_replicate", "dp_shard")
_MODEL_AXIS_WEIGHT = 10.0  # how much rather the data axes are changed, which decide nothing about the model
_ROWS_OF_AN_EXPLANATION = 64


def nearest_plan(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """The sizes nearest to `sizes` whose product is `world_size`.

    Axes that are in use may change, and dp_shard may join them. Near means few doublings, of data axes before others.
    """
    free = [axis for axis in AXES if sizes[axis] > 1 or axis == "dp_shard"]

    def distance(candidate: Sequence[int]) -> float:
        return sum(
            (1.0 if axis in DATA_AXES else _MODEL_AXIS_WEIGHT) * abs(math.log(new / sizes[axis]))
            for axis, new in zip(free, candidate, strict=True)
        )

    best = min(_factorisations(world_size, len(free)), key=distance)
    return {**dict.fromkeys(AXES, 1), **dict(zip(free, best, strict=True))}


def _factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorisations(number // first, parts - 1):
                yield (first, *rest)


def as_arguments(sizes: Mapping[str, int]) -> str:
    """ "dp_shard_size=2, tp_size=4": the sizes other than 1 as a caller writes them."""
    return ", ".join(f"{axis}_size={size}" for axis, size in sizes.items() if size > 1) or "no axis above 1"


def as_product(sizes: Mapping[str, int]) -> str:
    """ "2 (dp_shard) x 4 (tp) = 8"."""
    factors = [f"{size} ({axis})" for axis, size in sizes.items() if size > 1]
    return f"{' x '.join(factors) or '1'} = {math.prod(sizes.values())}"


def places(sizes: Mapping[str, int]) -> str:
    """A table of ranks and their coordinates along the axes that are in use; the first 64 ranks of a larger mesh."""
    used = [axis for axis in AXES if sizes[axis] > 1]
    total = math.prod(sizes.values())
    head = "  ".join(["rank", *used])
    rows = [
        "  ".join([str(rank).rjust(4), *(str(at).rjust(len(axis)) for at, axis in zip(place, used, strict=True))])
        for rank, place in enumerate(
            itertools.islice(itertools.product(*(range(sizes[axis]) for axis in used)), _ROWS_OF_AN_EXPLANATION)
        )
    ]
    if total > _ROWS_OF_AN_EXPLANATION:
        rows.append(f"... and so on up to rank {total - 1}: the last axis changes fastest")
    return "\n".join([head, *rows])
