"""Whole state of sharded models, without more than one whole tensor at a time off rank 0."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .arguments import require_models
from .dispatch.placeholders import OffloadedWeight
from .dispatch.stored_states import get_state_dict_offloaded_model
from .plan import is_pipelined
from .repointing import canonical_name
from .unwrap import inner_model, inside_compiled
from .whole_tensors import copy_on_cpu, gathered, memory_key


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether any parameter or buffer is a DTensor."""
    return any(isinstance(tensor, DTensor) for tensor in (*model.parameters(), *model.buffers()))


def is_spread(model: nn.Module) -> bool:
    """Whether no rank has all of the model's weights by itself: they are sharded, or it is pipelined."""
    inside = inside_compiled(model)
    return is_pipelined(model) or isinstance(inside, FullyShardedDataParallel) or model_has_dtensor(model)


def full_state_dict(model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
    """The model's whole state. Every rank calls it.

    Args:
        model: prepared or bare.
        unwrap: False keeps the names that wrappers give.

    Returns:
        Of a sharded or pipelined model: on rank 0 everything, on the CPU, as copies that training does not change, tied
        weights as one; elsewhere an empty dict. Of a model with offloaded weights: those too, read to the CPU. Of
        others: `model.state_dict()`.

    Cost: an all-gather per sharded tensor; of a pipelined model each tensor is also sent to rank 0.
    """
    require_models("get_state_dict", [model])
    if is_pipelined(model):
        from .pipeline.whole import whole_state

        return whole_state(cast(Any, model))
    flat = inside_compiled(model)
    if isinstance(flat, FullyShardedDataParallel):
        return _whole_of_flat(flat)
    if unwrap:
        model = inner_model(model)
    if any(isinstance(tensor, OffloadedWeight) for tensor in (*model.parameters(), *model.buffers())):
        return get_state_dict_offloaded_model(model)
    state: dict[str, Any] = model.state_dict()
    if not model_has_dtensor(model):
        return state
    is_main, copies = dist.get_rank() == 0, dict[Any, Tensor]()
    for value in state.values():
        if isinstance(value, Tensor) and (key := memory_key(value)) not in copies:
            whole = gathered(value)
            copies[key] = copy_on_cpu(whole) if is_main else value
    if not is_main:
        return {}
    return {name: copies[memory_key(v)] if isinstance(v, Tensor) else v for name, v in state.items()}


def _whole_of_flat(model: FullyShardedDataParallel) -> dict[str, Any]:
    """Under FSDP version 1. Its own full state dict is not copied if it lies on the CPU, and is freed afterwards."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, rank0_only=True):
        if dist.get_rank() != 0:
            return {}
        named = dict(model.named_parameters(remove_duplicate=False))
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:  # noqa: SLF001 - kept nowhere else
                    named[f"{prefix}.{name}" if prefix else name] = buffer
        copies: dict[Any, Tensor] = {}
        for tensor in named.values():
            if (key := memory_key(tensor)) not in copies:
                copies[key] = copy_on_cpu(tensor)
        return {canonical_name(name): copies[memory_key(tensor)] for name, tensor in named.items()}
