"""Which device kinds compute in which half-precision types."""

from __future__ import annotations

import torch

from accel_state.errors import PrecisionError

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def supports_dtype(dtype: torch.dtype, device_type: str) -> bool:
    """Whether autocast to `dtype` works on this kind of device here.

    Args:
        dtype: torch.float32, torch.float16 or torch.bfloat16.
        device_type: "cpu", "cuda", "mps", "xpu" and so on, as in `torch.device.type`.
    """
    if dtype is torch.float32:
        return True
    if not torch.amp.is_autocast_available(device_type):
        return False
    if dtype is not torch.bfloat16 or device_type == "cpu":
        return True
    if device_type == "mps":
        return torch.backends.mps.is_available() and torch.backends.mps.is_macos_or_newer(14, 0)
    module = torch.get_device_module(device_type) if hasattr(torch, device_type) else None  # XLA has its own
    ask = getattr(module, "is_bf16_supported", None)
    return bool(ask()) if ask is not None else True  # no question to ask: autocast lists the type


def require_dtype(dtype: torch.dtype, device_type: str) -> None:
    """Raise PrecisionError, naming the way out, where `supports_dtype` says no."""
    if supports_dtype(dtype, device_type):
        return
    wanted = _NAMES.get(dtype, str(dtype))
    others = [name for other, name in _NAMES.items() if other is not dtype and supports_dtype(other, device_type)]
    raise PrecisionError(
        f"mixed_precision={wanted!r} asks for {dtype} on {device_type!r}, which cannot compute in it here: "
        f"use mixed_precision={' or '.join(map(repr, [*others, 'no']))}."
    )
