"""Losses that are sums: divided once, by the items that all micro-batches of a window had on all ranks together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_state.errors import PlanError, SettingError


class ItemWindow:
    """What one accumulation window has seen: how its losses were given, and its items on this rank.

    Args:
        models: whose gradients belong to the window; empty means all that were prepared.
        one_per_step: refuse a second backward in one micro-step, whose items could be meant again or anew.
    """

    __slots__ = ("_kind", "_one_per_step", "_was_used", "items", "models")

    def __init__(self, models: Sequence[nn.Module] = (), *, one_per_step: bool = True) -> None:
        self.models, self._one_per_step = models, one_per_step
        self.begin()

    def begin(self) -> None:
        """A new window."""
        self._kind: str | None = None
        self.items: Tensor | None = None
        self._was_used = False

    def next_step(self) -> None:
        """The next micro-step of the same window."""
        self._was_used = False

    def note_mean(self) -> None:
        """A backward of a mean.

        Raises:
            PlanError: there was one of a sum before it in the window.
        """
        if self._kind == "sum":
            raise PlanError(_MIXED.format("without num_items", "with it"))
        self._kind = "mean"

    def add(self, items: Tensor) -> bool:
        """Count the items of a backward of a sum.

        Returns:
            Whether the window holds gradients of earlier micro-steps.

        Raises:
            PlanError: there was a backward of a mean before it, or another one in the same micro-step.
        """
        if self._kind == "mean":
            raise PlanError(_MIXED.format("with num_items", "without it"))
        if self._was_used and self._one_per_step:
            raise PlanError(
                "a second backward(loss_sum, num_items=...) in one micro-step would count its items twice: add the "
                "losses and call it once, or give models with losses of their own accumulate blocks of their own"
            )
        earlier = self.items
        self._kind, self._was_used = "sum", True
        self.items = items if earlier is None else earlier + items
        return earlier is not None


_MIXED = (
    "backward {} in an accumulation window that began {}: the gradients of the two would be scaled differently. Use "
    "one of them from the window's first micro-batch to its last"
)


def refuse_unreduced(ignored: Iterable[nn.Module]) -> None:
    """Refuse trained modules whose gradients ranks keep to themselves.

    Args:
        ignored: modules that FSDP leaves alone.

    Raises:
        PlanError: one of them is trained.
    """
    for module in ignored:
        trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        if trained:
            raise PlanError(
                f"backward(..., num_items=...) and a {type(module).__name__} that FSDP ignores: gradients of "
                f"{', '.join(trained[:3])} are not reduced over ranks, so they cannot be those of the mean over all "
                "ranks' items. Freeze it, let FSDP share it, or pass means without num_items and reduce its gradients "
                "yourself"
            )


def as_items(num_items: Any, device: torch.device) -> Tensor:
    """A count as a scalar tensor on `device`. A number or a tensor there costs no wait for the device.

    Raises:
        SettingError: not a single number from 0.
    """
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise SettingError(
                f"num_items of shape {tuple(num_items.shape)}: give one number, such as labels.ne(-100).sum()"
            )
        return num_items.detach().reshape(()).to(device, torch.float32)
    if isinstance(num_items, bool) or not isinstance(num_items, int | float) or not num_items >= 0:
        raise SettingError(f"num_items={num_items!r}: give the number of items that the loss sums over, from 0 on")
    return torch.full((), num_items, dtype=torch.float32, device=device)


def start_total(items: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Any]:
    """Begin to add the ranks' counts.

    Args:
        items: of this rank.
        group: the ranks with items of their own; None if there are no others.

    Returns:
        The total, valid once the second value, if there is one, was waited for.

    Cost: one asynchronous all-reduce of 4 bytes.
    """
    total = items.clone()
    return total, None if group is None else dist.all_reduce(total, group=group, async_op=True)


def factor_for(total: Tensor, divisor: int) -> Tensor:
    """What turns gradients of sums, divided by `divisor` in the reduction, into those of the mean over all items.

    Without items on any rank the sums stay as they are: nothing was summed, so they are zero.
    """
    return divisor / torch.where(total == 0, 1.0, total)


def scale_gradients(models: Iterable[nn.Module], factor: Tensor) -> None:
    """Multiply the gradients of the models by a scalar tensor, each once, in place; sharded ones in their own parts."""
    seen: set[int] = set()
    by_device: dict[torch.device, list[Tensor]] = {}
    for model in models:
        for parameter in model.parameters():
            if parameter.grad is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            gradient = parameter.grad
            local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            by_device.setdefault(local.device, []).append(local)
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device))
