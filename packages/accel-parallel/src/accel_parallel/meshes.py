"""The parts of a mesh that steps and the loop work on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .mesh_plans import DATA_AXES
from .plan import PlanContext

LOSS_AXES = (*DATA_AXES, "cp", "sp")
"""Axes along which ranks see different tokens, so that gradients are averaged over them."""

_SHARD_AXES = ("dp_shard", "cp", "sp")


def axis_size(context: PlanContext, axis: str) -> int:
    """The size of one axis; 1 where the mesh, if there is one, has none of that name."""
    return _sizes(context.mesh).get(axis, 1)


def data_parallel_size(context: PlanContext) -> int:
    """The number of ranks with data of their own."""
    if context.mesh is None:
        return context.world_size
    return math.prod(axis_size(context, axis) for axis in DATA_AXES)


def loss_size(context: PlanContext) -> int:
    """The number of ranks that gradients are averaged over."""
    if context.mesh is None:
        return context.world_size
    return math.prod(axis_size(context, axis) for axis in LOSS_AXES)


def loss_group(context: PlanContext) -> dist.ProcessGroup | None:
    """The ranks that gradients are averaged over; None where this is one rank alone."""
    if loss_size(context) == 1 or not dist.is_initialized():
        return None
    if context.mesh is None:
        group: dist.ProcessGroup | None = context.process_group or dist.group.WORLD
        return group
    return flattened(context.mesh, LOSS_AXES, "loss").get_group()


def fsdp_mesh(context: PlanContext) -> DeviceMesh:
    """The mesh for `fully_shard`: (replicas, ranks that share) or the latter alone.

    Args:
        context: without a mesh, all ranks share.

    Cost: makes a process group where the mesh does not have it yet.
    """
    mesh = context.mesh
    if mesh is None:
        return init_device_mesh(context.device.type, (context.world_size,), mesh_dim_names=("dp_shard",))
    if mesh.mesh_dim_names is None:
        whole: DeviceMesh = mesh
        return whole
    sharing = flattened(mesh, _SHARD_AXES, "dp_shard_cp")
    if axis_size(context, "dp_replicate") > 1:
        name = "dp_shard" if _used(mesh, _SHARD_AXES) == ["dp_shard"] else "dp_shard_cp"
        sharing = mesh["dp_replicate", name]
    return sharing


def flattened(mesh: DeviceMesh, axes: Sequence[str], name: str) -> DeviceMesh:
    """Those of `axes` that the mesh has, as one axis of the name `name`."""
    there = _used(mesh, axes)
    if len(there) == 1:
        return mesh[there[0]]
    part = mesh if tuple(there) == mesh.mesh_dim_names else mesh[tuple(there)]
    return part._flatten(name)  # noqa: SLF001 - torch has no public way; it returns the mesh made the first time


def _used(mesh: DeviceMesh, axes: Sequence[str]) -> list[str]:
    return [axis for axis in axes if axis in (mesh.mesh_dim_names or ())]


def _sizes(mesh: Any) -> dict[str, int]:
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return dict(zip(names, () if mesh is None else mesh.mesh.shape, strict=bool(names)))
