"""Run a model's `forward` (or another method) under autocast without changing what the model is.

The method is replaced on the instance, not on the class: `type(model)`, `isinstance`, parameter names and submodules
stay. What replaces it refers to the model weakly, so that dropping the model frees it at once, and pickles and
deep-copies together with it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .fp8.backend import ForwardContext
from .outputs import HALF_DTYPES, convert_to_fp32
from .weak_method import WeakMethod

M = TypeVar("M", bound=nn.Module)

# Entering torch.autocast costs 2 us when the object is reused (which is not re-entrant) and 6 us when it is made anew.
# These are the calls that it consists of; with the previous state in local variables they are re-entrant.
_is_compiling = torch.compiler.is_compiling
_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
_get_dtype, _set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
_is_cache_enabled, _set_cache_enabled = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
_nest, _unnest = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
_clear_cache = torch.clear_autocast_cache


class AutocastMethod:
    """What `PrecisionPolicy.wrap` puts in place of a method: the same one under autocast, its outputs in fp32.

    Args:
        original: the method without autocast, also `__wrapped__`.
        device_type: whose operations are cast.
        dtype: what they are cast to.
        enabled, cache_enabled: as of `torch.autocast`.
        convert_outputs: False leaves outputs in the types in which they were computed.
        forward_context: a further block to run in, by whether the model trains; None for none.
    """

    __slots__ = ("__wrapped__", "_cache_enabled", "_context", "_convert", "_device_type", "_dtype", "_enabled")

    def __init__(
        self,
        original: Callable[..., Any],
        *,
        device_type: str,
        dtype: torch.dtype,
        enabled: bool,
        cache_enabled: bool,
        convert_outputs: bool,
        forward_context: ForwardContext | None,
    ) -> None:
        self.__wrapped__ = original
        self._context = forward_context
        self._device_type, self._dtype, self._enabled = device_type, dtype, enabled
        self._cache_enabled, self._convert = cache_enabled, convert_outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method. Adds about 2 us, and one cast per half-precision output."""
        if _is_compiling():
            return self._call_traced(args, kwargs)
        device_type = self._device_type
        enabled, dtype, cache_enabled = _is_enabled(device_type), _get_dtype(device_type), _is_cache_enabled()
        _nest()
        try:
            _set_enabled(device_type, self._enabled)
            _set_dtype(device_type, self._dtype)
            _set_cache_enabled(self._cache_enabled)
            if self._context is None:
                out = self.__wrapped__(*args, **kwargs)
            else:
                with self._own_block():
                    out = self.__wrapped__(*args, **kwargs)
        finally:
            if _unnest() == 0:
                _clear_cache()
            _set_enabled(device_type, enabled)
            _set_dtype(device_type, dtype)
            _set_cache_enabled(cache_enabled)
        if not self._convert:
            return out
        if type(out) is Tensor:
            return out.float() if out.dtype in HALF_DTYPES else out
        return convert_to_fp32(out)

    def _call_traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same in the form that torch.compile and torch.export understand."""
        with (
            torch.autocast(
                self._device_type, dtype=self._dtype, enabled=self._enabled, cache_enabled=self._cache_enabled
            ),
            self._own_block(),
        ):
            out = self.__wrapped__(*args, **kwargs)
        return convert_to_fp32(out) if self._convert else out

    def _own_block(self) -> Any:
        """The further block; a method without a model trains."""
        return nullcontext() if self._context is None else self._context(getattr(self.__self__, "training", True))

    @property
    def __name__(self) -> str:
        return str(self.__wrapped__.__name__)

    @property
    def __self__(self) -> Any:
        return getattr(self.__wrapped__, "__self__", None)

    def bare_view(self, model: M) -> M:
        """`unwrap_forward`, for those who meet this object on a model and don't import this package."""
        return unwrap_forward(model)

    def __repr__(self) -> str:
        return f"<{self.__wrapped__!r} under autocast to {self._dtype} on {self._device_type}>"


def wrap_method(
    model: M,
    name: str,
    *,
    device_type: str,
    dtype: torch.dtype,
    enabled: bool,
    cache_enabled: bool | None,
    convert_outputs: bool,
    forward_context: ForwardContext | None = None,
) -> M:
    """Put an `AutocastMethod` in place of `model.<name>`, and what it was at `model._original_<name>`.

    A model that is wrapped already gets the new settings, never a second layer.
    """
    present = vars(model).get(name)
    if isinstance(present, AutocastMethod):
        original = present.__wrapped__
    else:
        original = WeakMethod(model, name) if present is None else present
    vars(model)[f"_original_{name}"] = original
    vars(model)[name] = AutocastMethod(
        original,
        device_type=device_type,
        dtype=dtype,
        enabled=enabled,
        cache_enabled=torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled,
        convert_outputs=convert_outputs,
        forward_context=forward_context,
    )
    return model


def unwrap_method(model: M, name: str) -> M:
    """Undo `wrap_method` on the model itself; one that is not wrapped stays as it is."""
    present = vars(model).get(name)
    if isinstance(present, AutocastMethod):
        del vars(model)[name], vars(model)[f"_original_{name}"]
        if not isinstance(present.__wrapped__, WeakMethod):
            vars(model)[name] = present.__wrapped__  # it was on the instance before
    return model


def unwrap_forward(model: M) -> M:
    """The model as it is without autocast, as a view: the one that was passed stays wrapped and keeps working.

    The view is another object of the same class over the same parameters, buffers, submodules and hooks, so it sees
    every later update. A model without autocast methods is returned itself.
    """
    originals = {name: value.__wrapped__ for name, value in vars(model).items() if isinstance(value, AutocastMethod)}
    if not originals:
        return model
    dropped = {*originals, *(f"_original_{name}" for name in originals)}
    view = object.__new__(type(model))
    view.__dict__.update({name: value for name, value in vars(model).items() if name not in dropped})
    view.__dict__.update({name: value for name, value in originals.items() if not isinstance(value, WeakMethod)})
    return view
