"""Whole state of sharded models, without more than one whole tensor at a time off rank 0."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether any parameter or buffer is a DTensor."""
    return any(isinstance(tensor, DTensor) for tensor in (*model.parameters(), *model.buffers()))


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The model's whole state. Every rank calls it.

    Returns:
        Of a sharded model: on rank 0 everything, on the CPU, as copies that training does not change; elsewhere an
        empty dict. Of others: `model.state_dict()`.

    Cost: an all-gather per sharded tensor.
    """
    if isinstance(model, FullyShardedDataParallel):
        config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            whole: dict[str, Any] = model.state_dict()
        return whole
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


def _copy_on_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
