"""All stages' weights on rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_parallel.pipeline.model import PipelinedModel
from accel_parallel.whole_tensors import copy_on_cpu, gathered, memory_key
from accel_state import gather_object


def whole_state(model: PipelinedModel) -> dict[str, Any]:
    """The whole model's state on rank 0, on the CPU, in the whole model's order; elsewhere an empty dict.

    Every rank calls it.

    Cost: an all-gather per sharded tensor; each tensor is sent to rank 0 once, by one rank of its stage; one object
    gather of about 100 bytes per tensor.
    """
    state = model.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    first = _first_names(tensors)
    told = gather_object([[(name, _description(value, first.get(name))) for name, value in state.items()]])
    senders = dist.get_process_group_ranks(model.group)
    is_main, serves_main = dist.get_rank() == 0, 0 in senders
    found: dict[str, Any] = {}
    for name, value in tensors.items():
        if first[name] == name:
            whole = gathered(value)
            if is_main:
                found[name] = copy_on_cpu(whole)
            elif serves_main:
                dist.send(_as_bytes(whole, model.device), dst=0, group=model.group)
    if not is_main:
        return {}
    for rank in senders:
        _take(found, told[rank], rank, model)
    return {name: found[name] for name in model.state_names if name in found}


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Of each tensor the first name that it has on this rank."""
    by_memory: dict[Any, str] = {}
    return {name: by_memory.setdefault(memory_key(value), name) for name, value in tensors.items()}


def _description(value: Any, first_name: str | None) -> tuple[Any, ...]:
    """What rank 0 has to know beforehand: dtype, shape and first name of a tensor, else the value."""
    return (value,) if first_name is None else (value.dtype, tuple(value.shape), first_name)


def _take(found: dict[str, Any], told: Sequence[tuple[str, tuple[Any, ...]]], rank: int, model: PipelinedModel) -> None:
    """What one rank has, which rank 0 may be itself; tied names come to be one tensor again."""
    for name, description in told:
        if len(description) == 1:
            found[name] = description[0]
            continue
        dtype, shape, first_name = description
        if name != first_name:
            found[name] = found[first_name]
        elif rank != 0:
            tensor = torch.empty(shape, dtype=dtype)
            buffer = torch.empty(tensor.nbytes, dtype=torch.uint8, device=model.device)
            dist.recv(buffer, src=rank, group=model.group)
            found[name] = buffer.cpu().view(dtype).reshape(shape)


def _as_bytes(tensor: Tensor, device: torch.device) -> Tensor:
    """In a form that every backend sends, whatever the dtype."""
    return tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
