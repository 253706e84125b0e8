"""Gradients that `fully_shard` keeps to itself while it does not reduce them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def so_far(parameters: Sequence[Tensor], models: Iterable[nn.Module]) -> list[Tensor]:
    """The gradients that parameters have inside an accumulation window.

    What `fully_shard` has not reduced lies, whole and of this rank alone, in tensors of its own and not in `.grad`.

    Args:
        parameters: those without any gradient are passed over.
        models: that may hold them.
    """
    kept = {
        id(parameter): gradient
        for model in models
        if isinstance(model, FSDPModule)
        for parameter, gradient in _kept_in(model)
    }
    found = []
    for parameter in parameters:
        gradient = kept.get(id(parameter), parameter.grad)
        if gradient is not None:
            found.append(gradient)
    return found


def _kept_in(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for held in _held_by(module):
                gradient = held.unsharded_accumulated_grad
                if gradient is None and hasattr(held, "_unsharded_param"):
                    gradient = held._unsharded_param.grad  # noqa: SLF001 - torch has no public way to it
                if gradient is not None:
                    yield held.sharded_param, gradient


def _held_by(module: FSDPModule) -> Iterator[Any]:
    state = module._get_fsdp_state()  # noqa: SLF001 - as above
    groups = getattr(state, "_fsdp_param_groups", None)  # one group and no list of them before torch 2.12
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # noqa: SLF001
    for group in groups:
        yield from group.fsdp_params
