"""Mixed precision that never surprises, for plain PyTorch models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from .capability import require_dtype as require_dtype
    from .capability import supports_dtype as supports_dtype
    from .handlers import AutocastKwargs as AutocastKwargs
    from .handlers import GradScalerKwargs as GradScalerKwargs
    from .outputs import ConvertOutputsToFp32 as ConvertOutputsToFp32
    from .outputs import convert_outputs_to_fp32 as convert_outputs_to_fp32
    from .outputs import convert_to_fp32 as convert_to_fp32
    from .policy import PrecisionPolicy as PrecisionPolicy
    from .policy import PrecisionType as PrecisionType
    from .scaler import GradScaler as GradScaler
    from .step import AutocastStep as AutocastStep
    from .step import autocast_step as autocast_step
    from .wrap import AutocastMethod as AutocastMethod
    from .wrap import unwrap_forward as unwrap_forward

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "policy": ["PrecisionPolicy", "PrecisionType"],
        "handlers": ["AutocastKwargs", "GradScalerKwargs"],
        "wrap": ["AutocastMethod", "unwrap_forward"],
        "outputs": ["convert_to_fp32", "convert_outputs_to_fp32", "ConvertOutputsToFp32"],
        "scaler": ["GradScaler"],
        "capability": ["supports_dtype", "require_dtype"],
        "step": ["AutocastStep", "autocast_step"],
    },
)
