"""Checks of what a training loop passes, made where they cost nothing per step or a type look-up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from accel_state.errors import PlanError


def as_parameters(parameters: Any) -> list[Tensor]:
    """One tensor or any iterable of them, as a list.

    Raises:
        PlanError: a model, an optimizer, a text, or something that cannot be iterated over.
    """
    if isinstance(parameters, Tensor):
        return [parameters]
    if isinstance(parameters, nn.Module | Optimizer | str) or not isinstance(parameters, Iterable):
        hint = "pass model.parameters()" if isinstance(parameters, nn.Module | Optimizer) else "pass those of a model"
        raise PlanError(f"parameters of type {type(parameters).__name__} are no tensors to clip: {hint}")
    return list(parameters)


def require_limit(name: str, limit: Any) -> None:
    """Refuse a limit of clipping that is no number from 0; a tensor's value is not looked at (it may be on a device).

    Raises:
        PlanError: names the argument and its value.
    """
    if not isinstance(limit, Tensor) and not (isinstance(limit, int | float) and limit >= 0):
        raise PlanError(f"{name}={limit!r} is no limit for gradients: give a number of at least 0, such as 1.0")


def require_models(caller: str, models: Sequence[Any]) -> None:
    """Refuse what is no module.

    Raises:
        PlanError: names the caller and what it got.
    """
    for model in models:
        if not isinstance(model, nn.Module):
            raise PlanError(f"{caller} takes models as prepare() returned them, and got {model!r}")


def require_loss(loss: Any) -> None:
    """Refuse a loss that is no tensor.

    Raises:
        PlanError: names its type; numbers have no gradient.
    """
    if not isinstance(loss, Tensor):
        raise PlanError(
            f"backward takes the loss as a tensor, and got {loss!r} of type {type(loss).__name__}: leave .item() and "
            "float() out, and of an output with several fields pass the loss"
        )
