"""Whole tensors from sharded ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def memory_key(tensor: Tensor) -> Any:
    """Equal for two tensors, both alive, that are the same numbers in the same memory: the names of a tied weight."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    storage = local.untyped_storage()._cdata  # noqa: SLF001 - a rank's part may be empty, and have no address
    return storage, local.storage_offset(), tensor.dtype, tuple(tensor.shape), local.stride()


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank that has a part; a plain one comes back itself. Cost: an all-gather."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_on_cpu(tensor: Tensor) -> Tensor:
    """A copy that training does not change."""
    return tensor.detach().to("cpu", copy=True)
