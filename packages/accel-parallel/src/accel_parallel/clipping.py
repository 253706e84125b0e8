"""One global gradient norm, over plain tensors and over tensors sharded on any meshes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import clip_grad_value_ as torch_clip_grad_value_
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from accel_parallel.arguments import as_parameters, require_limit
from accel_state.errors import PlanError


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    stages: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients so that their norm, as one vector, is at most `max_norm`.

    Args:
        parameters: one tensor or any iterable, a generator too; those without gradient are passed over.
        max_norm: the largest norm that is left alone.
        norm_type: p of the p-norm; inf takes the largest entry.
        error_if_nonfinite: raise RuntimeError on an infinite or undefined norm instead of returning it.
        foreach: torch's switch; None lets it take the fused path where there is one.
        stages: ranks with other parameters of the same model, those of a pipeline; all of them call this.

    Returns:
        The norm before clipping: a scalar tensor on the gradients' device, the same as without sharding.

    Cost: no device sync; for sharded gradients one all-reduce of a scalar per mesh, and one over `stages`.
    """
    parameters = as_parameters(parameters)
    require_limit("max_norm", max_norm)
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = norm_of(grads, norm_type, error_if_nonfinite and stages is None, foreach)
    if stages is not None:
        norm = over_stages(norm, norm_type, stages)
        _require_finite(norm, norm_type, error_if_nonfinite)
    for group in _by_mesh(parameters):
        clip_grads_with_norm_(group, max_norm, norm, foreach)
    return norm


def total_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm that `clip_grad_norm_` would return, without changing anything."""
    return norm_of([p.grad for p in as_parameters(parameters) if p.grad is not None], norm_type)


def over_stages(norm: Tensor, norm_type: float, stages: dist.ProcessGroup) -> Tensor:
    """The norm over all stages of a pipeline, given that of this rank's.

    Cost: one all-reduce of a scalar.
    """
    if norm_type == float("inf"):
        largest = norm.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=stages)
        return largest
    power = norm**norm_type
    dist.all_reduce(power, group=stages)
    return power ** (1 / norm_type)


def _require_finite(norm: Tensor, norm_type: float, is_required: bool) -> None:
    if is_required and not bool(norm.isfinite()):
        raise RuntimeError(f"the gradient norm of order {norm_type} is {norm.item()}: look for overflow in the loss.")


def norm_of(
    grads: Sequence[Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Tensor:
    """The norm of these tensors as one vector; sharded ones count as a whole, on whichever mesh."""
    if all(type(grad) is Tensor for grad in grads):
        return get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
    groups: dict[Any, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault(getattr(grad, "device_mesh", None), []).append(grad)
    norms = [get_total_norm(group, norm_type, False, foreach) for group in groups.values()]
    whole: list[Tensor] = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([part.to(whole[0].device) for part in whole]), norm_type)
    _require_finite(norm, norm_type, error_if_nonfinite)
    return norm


def flat_model_of(parameters: Sequence[Tensor], models: Iterable[nn.Module]) -> FullyShardedDataParallel | None:
    """The model under FSDP version 1 whose parameters these are; only it knows which gradients are parts of others.

    Raises:
        PlanError: they are a part of one, or one and more.
    """
    given = {id(parameter) for parameter in parameters}
    for model in models:
        if not isinstance(model, FullyShardedDataParallel):
            continue
        own = {id(parameter) for parameter in model.parameters()}
        if own == given:
            return model
        if own & given:
            raise PlanError(
                f"{len(own & given)} of the {len(own)} parameters of a model under FSDP version 1 are to be clipped, "
                f"with {len(given - own)} others: clip model.parameters() of each model, or use fsdp_version=2"
            )
    return None


def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float, *, foreach: bool | None = None) -> None:
    """Clamp each gradient's entries to [-clip_value, clip_value]."""
    parameters = as_parameters(parameters)
    require_limit("clip_value", clip_value)
    for group in _by_mesh(parameters):
        torch_clip_grad_value_(group, clip_value, foreach)


def _by_mesh(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """torch's fused operations refuse lists that mix plain tensors and sharded ones."""
    with_grad = [p for p in parameters if p.grad is not None]
    if all(type(p.grad) is Tensor for p in with_grad):
        return [with_grad]
    groups: dict[Any, list[Tensor]] = {}
    for parameter in with_grad:
        groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    return list(groups.values())
