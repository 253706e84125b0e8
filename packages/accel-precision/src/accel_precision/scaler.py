"""A loss scaler that several optimizers can share without agreeing on who updates it, and ranks without disagreeing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_state.errors import PrecisionError


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose `update` takes effect at the next `scale`, and whose ranks skip together.

    torch asks for one `update` per iteration, after all optimizers have stepped: after it, gradients that are still
    waiting would be divided by a new scale, or divided twice. A wrapper around one optimizer cannot know about the
    others, so each may call `update` after its own step, and the scale changes once, when the next loss is scaled (or
    the scale is read).

    Where parameters are sharded, a rank sees an overflow only if it lies in its own part. All ranks hear of it, so that
    all skip the update and scale alike.

    Args:
        args: of torch's scaler.
        sharded: each rank holds other gradients although they are plain tensors (FSDP1, pipeline stages). Those that
            are DTensors are noticed without.
        kwargs: of torch's scaler.

    Cost: with sharded parameters one all-reduce of 4 bytes per optimizer and update, over all ranks.
    """

    def __init__(self, *args: Any, sharded: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sharded = sharded
        self._update_is_due = False

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale to the overflows since the last one: at the next `scale`, or now to `new_scale`."""
        if new_scale is None:
            self._update_is_due = self.is_enabled()
        else:
            self._update_is_due = False
            super().update(new_scale)

    def scale(self, outputs: Any) -> Any:
        """The loss, or a tree of them, times the scale."""
        if self._update_is_due:
            self._update_now()
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, and look for overflows.

        Raises:
            PrecisionError: parameters are kept in fp16, whose gradients cannot be divided without loss.
        """
        try:
            super().unscale_(optimizer)
        except ValueError as error:
            if "FP16 gradients" not in str(error):
                raise
            raise PrecisionError(
                "the optimizer trains parameters that are kept in torch.float16, and loss scaling needs fp32 ones: "
                "bring them to fp32 before they are prepared, accel_precision.upcast_to_fp32(model)."
            ) from error

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """torch's step that every way to unscale ends in, with local gradients and an answer of all ranks.

        torch's own fails on plain tensors among DTensors and on DTensors of several meshes, and asks only the ranks of
        one mesh.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        is_dtensor = [hasattr(p, "to_local") for p in parameters]
        if not (self._sharded or any(is_dtensor)) or not dist.is_initialized():
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        local = _LocalGradients(
            [_with_local_gradient(p) if is_one else p for p, is_one in zip(parameters, is_dtensor, strict=True)]
        )
        found = super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16)  # type: ignore[arg-type]
        anywhere = found_inf.clone()  # also on a rank that has no gradient at all
        for on_device in found.values():
            anywhere = torch.maximum(anywhere, on_device.to(anywhere.device))
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        return {device: anywhere.to(device) for device in found or {anywhere.device: anywhere}}

    def get_scale(self) -> float:
        """The scale of the next loss. Waits for the device."""
        if self._update_is_due:
            self._update_now()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Scale and growth counter after the update that is due."""
        if self._update_is_due:
            self._update_now()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a snapshot; an update that is due belongs to the past and is dropped."""
        if self._update_is_due:
            self._update_now()
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        if self._update_is_due:
            self._update_now()
        return super().__getstate__()

    def _update_now(self) -> None:
        self._update_is_due = False
        super().update()


class _LocalGradients:
    """What torch's scaler looks at of an optimizer."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.param_groups = [{"params": parameters}]


def _with_local_gradient(parameter: Any) -> Tensor:
    """A tensor whose gradient is this rank's part of a DTensor's, sharing its memory."""
    local: Tensor = parameter.detach().to_local()
    local = local.detach()
    local.grad = None if parameter.grad is None else parameter.grad.to_local()
    return local
