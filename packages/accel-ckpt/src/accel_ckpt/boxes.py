"""Tensors that lie in pieces on several ranks: which box of the whole a rank holds, and the memory that holds it.

A box is an offset and a shape in the whole tensor. torch's DTensor is the one kind of sharded tensor that is known;
whatever made it (`fully_shard`, `parallelize_module`, `distribute_tensor`), its mesh and placements tell the box.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Box:
    """A part of a tensor.

    Args:
        offset: of its first element in the whole, per dim.
        shape: per dim.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """What both cover, or None."""
        start = tuple(map(max, self.offset, other.offset))
        ends = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        shape = tuple(min(a + n, b + m) - at for at, (a, n, b, m) in zip(start, ends, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def of(self, tensor: Tensor, within: Box) -> Tensor:
        """This box as a view of a tensor that holds the box `within`."""
        for dim, (at, size, base) in enumerate(zip(self.offset, self.shape, within.offset, strict=True)):
            tensor = tensor.narrow(dim, at - base, size)
        return tensor


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two boxes of a tensor cover the same element; a sweep along the dim that tells them apart best."""
    if len(boxes) < 2:
        return False
    dims = range(len(boxes[0].shape))
    dim = max(dims, key=lambda d: len({box.offset[d] for box in boxes}), default=None)
    if dim is None:
        return True
    ordered = sorted(boxes, key=lambda box: box.offset[dim])
    for i, one in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if other.offset[dim] >= one.offset[dim] + one.shape[dim]:
                break
            if one.common(other):
                return True
    return False


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor. Imports nothing: where nobody imported its module, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """The memory of this rank's box: the tensor itself unless it is sharded."""
    if not is_sharded(tensor):
        return tensor.detach()
    local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined] # DTensor's
    wait = getattr(local, "wait", None)  # an AsyncCollectiveTensor, while a redistribution is under way
    return wait() if callable(wait) else local


def box_of(tensor: Tensor) -> Box:
    """Which part of the whole this rank holds; no communication.

    Raises:
        RuntimeError: a DTensor with partial placements, whose values are not summed yet.
    """
    if not is_sharded(tensor):
        return whole_box(tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined] # what torch's own checkpoints go by
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def empty_beside(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised memory with a tensor's shape, device and, if it is sharded, mesh and placements."""
    if not is_sharded(tensor):
        return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    from torch.distributed.tensor import DTensor

    local = torch.empty_like(local_part(tensor), dtype=dtype)
    return DTensor.from_local(
        local,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def settle(model: nn.Module) -> None:
    """Give up weights that `fully_shard` has gathered and kept, so that each rank holds its own part again."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return
    for part in model.modules():
        if isinstance(part, module.FSDPModule):
            part.reshard()


def has_flat_parameters(model: nn.Module) -> bool:
    """Whether FSDP version 1 wraps a part of the model."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and any(isinstance(part, module.FullyShardedDataParallel) for part in model.modules())


def class_of(model: nn.Module) -> type:
    """The class that a model had before `fully_shard` put its own in front."""
    module = sys.modules.get("torch.distributed.fsdp")
    kind = type(model)
    if module is not None and isinstance(model, module.FSDPModule) and module.FSDPModule in kind.__bases__:
        return next(base for base in kind.__bases__ if base is not module.FSDPModule)
    return kind
