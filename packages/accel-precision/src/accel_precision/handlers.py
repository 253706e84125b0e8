"""What a user may change about autocast and loss scaling (the peer's names, fields and mutability)."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state import KwargsHandler
from accel_state.errors import PrecisionError


@dataclass
class AutocastKwargs(KwargsHandler):
    """How `torch.autocast` is entered.

    Args:
        enabled: False computes in the tensors' own types inside the block, also within an outer autocast.
        cache_enabled: keep the cast copies of weights until autocast ends; None leaves torch's choice.
        convert_outputs: ours: False lets prepared models return what they computed, half precision too. It says nothing
            to a block of `autocast`.
    """

    enabled: bool = True
    cache_enabled: bool | None = None
    convert_outputs: bool = True


@dataclass
class GradScalerKwargs(KwargsHandler):
    """How the loss is scaled so that fp16 gradients do not underflow.

    Args:
        init_scale: the first factor; 2**16 because it is far above what gradients need and backs off quickly.
        growth_factor: multiplies the scale after `growth_interval` updates without overflow.
        backoff_factor: multiplies the scale after an overflow.
        growth_interval: in updates.
        enabled: False makes a scaler that passes everything through.

    Raises:
        PrecisionError: a factor that could never work.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        rules = (
            ("init_scale", self.init_scale > 0, "above 0"),
            ("growth_factor", self.growth_factor > 1, "above 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1, "between 0 and 1"),
            ("growth_interval", self.growth_interval >= 1, "at least 1"),
        )
        for name, holds, allowed in rules:
            if not holds:
                raise PrecisionError(
                    f"{name}={getattr(self, name)!r} is not allowed for loss scaling: it must be {allowed}."
                )
