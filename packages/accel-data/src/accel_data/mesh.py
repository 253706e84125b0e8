"""Which ranks of a device mesh share data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from accel_state.errors import DataLoaderError

DATA_AXES = ("dp", "dp_replicate", "dp_shard")
"""Axes along which each rank gets data of its own."""

MODEL_AXES = ("pp", "cp", "sp", "tp")
"""Axes whose ranks work on the same samples."""


@dataclass(frozen=True)
class DataPlace:
    """Where this rank's data lies.

    Args:
        count: parts that the data is cut into.
        index: this rank's part.
        part_of_rank: every rank's part.
    """

    count: int
    index: int
    part_of_rank: tuple[int, ...]

    def is_copy(self, rank: int) -> bool:
        """Whether a lower rank has the same part as `rank`."""
        return self.part_of_rank.index(self.part_of_rank[rank]) != rank


def data_place(mesh: Any, rank: int) -> DataPlace:
    """This rank's place along the data axes of a `torch.distributed.DeviceMesh`.

    Args:
        mesh: with named axes; those of `DATA_AXES` count, in the mesh's order.
        rank: of this process in the job.

    Raises:
        DataLoaderError: an axis without a name or with an unknown one, or a rank outside the mesh.
    """
    names = tuple(mesh.mesh_dim_names or ())
    unknown = [name for name in names if name not in DATA_AXES + MODEL_AXES]
    if unknown or len(names) != mesh.mesh.ndim:
        raise DataLoaderError(
            f"The mesh has the axes {list(names)} for {mesh.mesh.ndim} dimensions; each has to be one of "
            f"{', '.join(DATA_AXES)} (ranks with data of their own) or {', '.join(MODEL_AXES)} (ranks that share it)."
        )
    part_of_rank: dict[int, int] = {}
    shape = tuple(mesh.mesh.shape)
    for flat, member in enumerate(mesh.mesh.flatten().tolist()):
        part_of_rank[member] = _data_index(flat, shape, names)
    if rank not in part_of_rank or sorted(part_of_rank) != list(range(len(part_of_rank))):
        raise DataLoaderError(f"The mesh holds the ranks {sorted(part_of_rank)}; it has to hold all, this is {rank}.")
    count = math.prod(size for size, name in zip(shape, names, strict=True) if name in DATA_AXES)
    return DataPlace(count, part_of_rank[rank], tuple(part_of_rank[member] for member in sorted(part_of_rank)))


def _data_index(flat: int, shape: tuple[int, ...], names: tuple[str, ...]) -> int:
    """The index along the data axes, of the rank at position `flat` of the mesh."""
    index, stride = 0, 1
    for size, name in zip(reversed(shape), reversed(names), strict=True):
        flat, at = divmod(flat, size)
        if name in DATA_AXES:
            index += at * stride
            stride *= size
    return index
