"""In which numbers a model computes, keeps its parameters, reduces its gradients and returns its outputs."""

from __future__ import annotations

import enum
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

import torch
from torch import nn

from accel_state.errors import PrecisionError

from .capability import require_dtype
from .handlers import AutocastKwargs, GradScalerKwargs
from .scaler import GradScaler
from .wrap import unwrap_method, wrap_method

M = TypeVar("M", bound=nn.Module)

_COMPUTE = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class PrecisionType(enum.StrEnum):
    """The names by which users ask for a precision."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"

    @classmethod
    def list(cls) -> list[str]:
        """All names, in order of definition."""
        return [member.value for member in cls]


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """A choice of number types, resolved once.

    Args:
        compute: what matrix products and convolutions run in, by autocast; float32 means without autocast.
        params: what parameters are kept in. Only float32 so far: autocast keeps full-precision parameters.
        reduce: what gradients are summed in over ranks. Only float32 so far, because gradients have their parameters'
            type; DDP's communication hooks compress the traffic.
        output: what a wrapped model returns in place of half precision; None leaves outputs as computed.

    Raises:
        PrecisionError: a type that could not be honoured.
    """

    compute: torch.dtype = torch.float32
    params: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    output: torch.dtype | None = torch.float32

    def __post_init__(self) -> None:
        if self.compute not in _COMPUTE.values():
            raise PrecisionError(f"compute={self.compute} is not allowed: use one of {[*_COMPUTE.values()]}.")
        for name, value in (("params", self.params), ("reduce", self.reduce)):
            if value is not torch.float32:
                raise PrecisionError(
                    f"{name}={value} cannot be honoured by autocast, which keeps parameters and gradients in "
                    f"torch.float32: leave {name} out, or cast the model yourself by model.to({value}) and use "
                    "compute=torch.float32."
                )
        if self.output not in (torch.float32, None):
            raise PrecisionError(f"output={self.output} is not allowed: torch.float32, or None to leave outputs alone.")

    @classmethod
    def from_name(cls, name: str | PrecisionType) -> PrecisionPolicy:
        """The policy that goes by "no", "fp16" or "bf16".

        Raises:
            PrecisionError: an unknown name, or "fp8", for which a recipe has to convert the model's layers.
        """
        key = str(name).lower()
        if key == PrecisionType.FP8:
            raise PrecisionError(
                "mixed_precision='fp8' needs a recipe that converts the model's linear layers, and none is built in "
                "yet: use mixed_precision='bf16', or convert the model yourself (torchao, transformer-engine) and use "
                "'bf16' around it."
            )
        if key not in _COMPUTE:
            near = get_close_matches(key, PrecisionType.list(), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise PrecisionError(f"mixed_precision={name!r} is unknown: use one of {PrecisionType.list()}.{hint}")
        return cls(compute=_COMPUTE[key])

    @property
    def name(self) -> str:
        """ "no", "fp16" or "bf16"."""
        return next(name for name, dtype in _COMPUTE.items() if dtype is self.compute)

    def autocast(self, device_type: str, handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """A block that computes by this policy.

        Args:
            device_type: whose operations are cast.
            handler: `AutocastKwargs(enabled=False)` gives a block in full precision, whatever surrounds it.

        Raises:
            PrecisionError: the device cannot compute in this type.
        """
        enabled = handler is None or handler.enabled
        if self.compute is torch.float32:
            return nullcontext() if enabled else torch.autocast(device_type, enabled=False)
        require_dtype(self.compute, device_type)
        cache_enabled = None if handler is None else handler.cache_enabled
        return torch.autocast(device_type, dtype=self.compute, enabled=enabled, cache_enabled=cache_enabled)

    def scaler(self, device_type: str, handler: GradScalerKwargs | None = None) -> GradScaler | None:
        """The loss scaler that fp16 needs, on CPU too; None for the other policies, which need none."""
        if self.compute is not torch.float16:
            if handler is not None:
                warnings.warn(
                    f"GradScalerKwargs have no effect with mixed_precision={self.name!r}: only 'fp16' scales the loss.",
                    stacklevel=2,
                )
            return None
        require_dtype(self.compute, device_type)
        options = {} if handler is None else handler.to_kwargs()
        return GradScaler(device_type, **options)

    def wrap(self, model: M, device_type: str, *, handler: AutocastKwargs | None = None, method: str = "forward") -> M:
        """Make `model.<method>` compute by this policy and return fp32; the same object is returned.

        `type(model)`, names of parameters, pickling and deep copies stay as they were, and no reference cycle is made.
        What the method was lies at `model._original_<method>`; `unwrap_forward(model)` is a view without autocast. The
        policy "no" takes away what an earlier policy put there.

        Args:
            model: any module; wrapped anew, it gets the new settings.
            device_type: where the model computes.
            handler: see `autocast`.
            method: another entry point than forward, such as "encode".

        Raises:
            PrecisionError: the device cannot compute in this type, or the model has no such method.
        """
        if not callable(getattr(model, method, None)):
            raise PrecisionError(f"{type(model).__name__} has no method {method!r} that could run under autocast.")
        if self.compute is torch.float32:
            return unwrap_method(model, method)
        require_dtype(self.compute, device_type)
        return wrap_method(
            model,
            method,
            device_type=device_type,
            dtype=self.compute,
            enabled=handler is None or handler.enabled,
            cache_enabled=None if handler is None else handler.cache_enabled,
            convert_outputs=self.output is not None,
        )
