"""In which numbers a model computes, keeps its parameters, reduces its gradients and returns its outputs."""

from __future__ import annotations

import enum
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

import torch
from torch import nn

from accel_state.errors import PrecisionError

from .capability import require_dtype
from .fp8.backend import Fp8Backend, fp8_backend
from .fp8.recipes import Recipe
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
        fp8: who computes linear layers in 8-bit floats, as of `fp8_backend`; everything else is computed in `compute`,
            which has to be bfloat16 then.

    Raises:
        PrecisionError: a type that could not be honoured.
    """

    compute: torch.dtype = torch.float32
    params: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    output: torch.dtype | None = torch.float32
    fp8: Fp8Backend | None = None

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
        if self.fp8 is not None and self.compute is not torch.bfloat16:
            raise PrecisionError(f"compute={self.compute} is not allowed with fp8: use torch.bfloat16 around it.")

    @classmethod
    def from_name(cls, name: str | PrecisionType, recipe: Recipe | None = None) -> PrecisionPolicy:
        """The policy that goes by "no", "fp16", "bf16" or "fp8".

        Args:
            name: one of those, in any case.
            recipe: for "fp8": whose 8-bit floats and how; see `fp8_backend` for the choice without one.

        Raises:
            PrecisionError: an unknown name, a recipe without "fp8", or one that cannot be had.
            MissingExtraError: the library of "fp8" is not installed.
        """
        key = str(name).lower()
        if key == PrecisionType.FP8:
            return cls(compute=torch.bfloat16, fp8=fp8_backend(recipe))
        if recipe is not None:
            raise PrecisionError(
                f"{type(recipe).__name__} has no effect with mixed_precision={name!r}: use mixed_precision='fp8', or "
                "leave it out."
            )
        if key not in _COMPUTE:
            near = get_close_matches(key, PrecisionType.list(), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise PrecisionError(f"mixed_precision={name!r} is unknown: use one of {PrecisionType.list()}.{hint}")
        return cls(compute=_COMPUTE[key])

    @property
    def name(self) -> str:
        """ "no", "fp16", "bf16" or "fp8"."""
        if self.fp8 is not None:
            return "fp8"
        return next(name for name, dtype in _COMPUTE.items() if dtype is self.compute)

    def recipe_of(self, kind: str) -> Any:
        """The recipe of the fp8 backend of this kind ("AO" or "TE"), or None where another one or none computes."""
        return self.fp8.recipe if self.fp8 is not None and self.fp8.kind == kind else None

    def require(self, device: torch.device | str) -> None:
        """Make sure that this device can compute so.

        Raises:
            PrecisionError: it cannot; says why, and what to use instead.
        """
        device = torch.device(device)
        require_dtype(self.compute, device.type)
        obstacle = None if self.fp8 is None else self.fp8.obstacle(device)
        if obstacle is not None:
            raise PrecisionError(obstacle)

    def autocast(self, device_type: str, handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """A block that computes by this policy.

        Args:
            device_type: whose operations are cast.
            handler: `AutocastKwargs(enabled=False)` gives a block in full precision, whatever surrounds it.

        Raises:
            PrecisionError: the device cannot compute in this type, or the handler is none.
        """
        if handler is not None and not isinstance(handler, AutocastKwargs):
            raise PrecisionError(f"autocast takes an AutocastKwargs, and got {handler!r}")
        enabled = handler is None or handler.enabled
        if self.compute is torch.float32:
            return nullcontext() if enabled else torch.autocast(device_type, enabled=False)
        require_dtype(self.compute, device_type)
        cache_enabled = None if handler is None else handler.cache_enabled
        return torch.autocast(device_type, dtype=self.compute, enabled=enabled, cache_enabled=cache_enabled)

    def scaler(
        self, device_type: str, handler: GradScalerKwargs | None = None, *, sharded: bool = False
    ) -> GradScaler | None:
        """The loss scaler that fp16 needs, on CPU too; None for the other policies, which need none.

        Args:
            device_type: where the model computes.
            handler: its options.
            sharded: see `GradScaler`.
        """
        if self.compute is not torch.float16:
            if handler is not None:
                warnings.warn(
                    f"GradScalerKwargs have no effect with mixed_precision={self.name!r}: only 'fp16' scales the loss.",
                    stacklevel=2,
                )
            return None
        require_dtype(self.compute, device_type)
        options = {} if handler is None else handler.to_kwargs()
        return GradScaler(device_type, sharded=sharded, **options)

    def convert(self, model: nn.Module, *, sharded: bool = False) -> nn.Module:
        """The model with 8-bit layers where the policy asks for them; before optimizers see it is as good as after.

        Args:
            model: converted in place; a model of a single layer is replaced.
            sharded: whether its parameters will be sharded, and can then be gathered in 8 bits.
        """
        return model if self.fp8 is None else self.fp8.convert(model, sharded=sharded)

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
            convert_outputs=self.output is not None and (handler is None or handler.convert_outputs),
            forward_context=None if self.fp8 is None else self.fp8.forward_context,
        )
