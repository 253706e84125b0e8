"""Whole state of sharded models, without more than one whole tensor at a time off rank 0."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from accel_state.errors import PlanError

from .plan import is_pipelined
from .repointing import canonical_name
from .unwrap import extract_model_from_parallel, inside_compiled


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether any parameter or buffer is a DTensor."""
    return any(isinstance(tensor, DTensor) for tensor in (*model.parameters(), *model.buffers()))


def full_state_dict(model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
    """The model's whole state. Every rank calls it.

    Args:
        model: prepared or bare.
        unwrap: False keeps the names that wrappers give.

    Returns:
        Of a sharded model: on rank 0 everything, on the CPU, as copies that training does not change; elsewhere an
        empty dict. Of others: `model.state_dict()`.

    Raises:
        PlanError: a rank has only some stages of the model.

    Cost: an all-gather per sharded tensor.
    """
    if is_pipelined(model):
        raise PlanError(
            "no rank has a pipelined model's whole state: each has that of its stages, by the whole model's names. "
            "Call model.state_dict() on every rank"
        )
    flat = inside_compiled(model)
    if isinstance(flat, FullyShardedDataParallel):
        return _whole_of_flat(flat)
    if unwrap:
        model = extract_model_from_parallel(model, keep_torch_compile=False)
    state: dict[str, Any] = model.state_dict()
    if not model_has_dtensor(model):
        return state
    is_first = dist.get_rank() == 0
    for name in list(state):
        value = state.pop(name)
        whole_value = value.full_tensor() if isinstance(value, DTensor) else value
        if is_first:
            state[name] = _copy_on_cpu(whole_value)
    return state


def _whole_of_flat(model: FullyShardedDataParallel) -> dict[str, Any]:
    """Under FSDP version 1. Its own full state dict is not copied if it lies on the CPU, and is freed afterwards."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, rank0_only=True):
        if dist.get_rank() != 0:
            return {}
        whole = {
            canonical_name(name): _copy_on_cpu(tensor)
            for name, tensor in model.named_parameters(remove_duplicate=False)
        }
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:  # noqa: SLF001 - kept nowhere else
                    whole[canonical_name(f"{prefix}.{name}" if prefix else name)] = _copy_on_cpu(buffer)
    return whole


def _copy_on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
