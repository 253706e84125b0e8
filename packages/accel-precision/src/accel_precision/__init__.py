"""Mixed precision that never surprises, for plain PyTorch models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from .by_state import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
    from .by_state import get_grad_scaler as get_grad_scaler
    from .by_state import get_mixed_precision_context_manager as get_mixed_precision_context_manager
    from .capability import require_dtype as require_dtype
    from .capability import supports_dtype as supports_dtype
    from .fp8.ao import convert_model_to_fp8_ao as convert_model_to_fp8_ao
    from .fp8.ao import filter_first_and_last_linear_layers as filter_first_and_last_linear_layers
    from .fp8.ao import has_ao_layers as has_ao_layers
    from .fp8.backend import Fp8Backend as Fp8Backend
    from .fp8.backend import FP8BackendType as FP8BackendType
    from .fp8.backend import fp8_backend as fp8_backend
    from .fp8.recipes import AORecipeKwargs as AORecipeKwargs
    from .fp8.recipes import FP8RecipeKwargs as FP8RecipeKwargs
    from .fp8.recipes import MSAMPRecipeKwargs as MSAMPRecipeKwargs
    from .fp8.recipes import TERecipeKwargs as TERecipeKwargs
    from .fp8.step import Fp8Step as Fp8Step
    from .fp8.step import fp8_step as fp8_step
    from .fp8.te import apply_fp8_autowrap as apply_fp8_autowrap
    from .fp8.te import contextual_fp8_autocast as contextual_fp8_autocast
    from .fp8.te import convert_model as convert_model
    from .fp8.te import has_transformer_engine_layers as has_transformer_engine_layers
    from .handlers import AutocastKwargs as AutocastKwargs
    from .handlers import GradScalerKwargs as GradScalerKwargs
    from .outputs import ConvertOutputsToFp32 as ConvertOutputsToFp32
    from .outputs import convert_outputs_to_fp32 as convert_outputs_to_fp32
    from .outputs import convert_to_fp32 as convert_to_fp32
    from .policy import PrecisionPolicy as PrecisionPolicy
    from .policy import PrecisionType as PrecisionType
    from .scaler import GradScaler as GradScaler
    from .step import ENTRY_POINTS as ENTRY_POINTS
    from .step import AutocastStep as AutocastStep
    from .step import autocast_step as autocast_step
    from .upcast import upcast_to_fp32 as upcast_to_fp32
    from .wrap import AutocastMethod as AutocastMethod
    from .wrap import unwrap_forward as unwrap_forward

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "policy": ["PrecisionPolicy", "PrecisionType"],
        "handlers": ["AutocastKwargs", "GradScalerKwargs"],
        "wrap": ["AutocastMethod", "unwrap_forward"],
        "outputs": ["convert_to_fp32", "convert_outputs_to_fp32", "ConvertOutputsToFp32"],
        "upcast": ["upcast_to_fp32"],
        "scaler": ["GradScaler"],
        "capability": ["supports_dtype", "require_dtype"],
        "by_state": ["get_grad_scaler", "get_fsdp2_grad_scaler", "get_mixed_precision_context_manager"],
        "step": ["AutocastStep", "autocast_step", "ENTRY_POINTS"],
        "fp8.recipes": ["AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs", "FP8RecipeKwargs"],
        "fp8.backend": ["Fp8Backend", "FP8BackendType", "fp8_backend"],
        "fp8.ao": ["convert_model_to_fp8_ao", "filter_first_and_last_linear_layers", "has_ao_layers"],
        "fp8.te": [
            "apply_fp8_autowrap",
            "contextual_fp8_autocast",
            "convert_model",
            "has_transformer_engine_layers",
        ],
        "fp8.step": ["Fp8Step", "fp8_step"],
    },
)
