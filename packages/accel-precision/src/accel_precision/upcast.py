"""Bring a model's half-precision tensors to full precision, in place."""

from __future__ import annotations

from torch import nn

from .outputs import HALF_DTYPES


def upcast_to_fp32(model: nn.Module, *, trained_only: bool = False) -> list[str]:
    """Keep a model's fp16 and bf16 parameters and buffers in fp32 from now on.

    Mixed precision keeps full-precision weights and casts what it computes with; a model that was loaded in half
    precision would keep its weights, and the optimizer its state, in that. Parameters stay the same objects.

    Args:
        model: changed in place; call it before its optimizer has taken a step.
        trained_only: leave frozen parameters and buffers as they are.

    Returns:
        The names of what was changed.

    Cost: twice the memory of what was in half precision.
    """
    changed = []
    for name, parameter in model.named_parameters():
        if parameter.dtype in HALF_DTYPES and (parameter.requires_grad or not trained_only):
            parameter.data = parameter.data.float()
            changed.append(name)
    if trained_only:
        return changed
    for name, buffer in model.named_buffers():
        if buffer.dtype in HALF_DTYPES:
            buffer.data = buffer.data.float()
            changed.append(name)
    return changed
