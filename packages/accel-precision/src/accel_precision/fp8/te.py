"""8-bit floats by NVIDIA's transformer-engine: layers of its own, and a block that its scales live in."""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, update_wrapper
from typing import Any, TypeVar

import torch
from torch import nn

from accel_precision.weak_method import WeakMethod
from accel_state import check_cuda_fp8_capability, is_transformer_engine_mxfp8_available
from accel_state.errors import PrecisionError

from .backend import FP8BackendType, take_over
from .recipes import DELAYED_DEFAULTS, TERecipeKwargs

M = TypeVar("M", bound=nn.Module)

MULTIPLE = 16
"""8-bit products of transformer-engine need both sizes of a weight to divide by it."""

_CLASSES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


def _library(name: str) -> Any:
    """A module of transformer-engine.

    Raises:
        ImportError: it is not installed.
        PrecisionError: it is installed, and broken: its own checks raise whatever they like.
    """
    try:
        return importlib.import_module(f"transformer_engine.{name}")
    except ImportError:
        raise
    except Exception as error:
        raise PrecisionError(
            f"transformer-engine is installed but cannot be imported ({type(error).__name__}: {error}): install it "
            "with its part for torch, or use AORecipeKwargs or mixed_precision='bf16'."
        ) from error


# ---------------------------------------------------------------- layers


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether the model holds layers of transformer-engine: its linear or normalising ones."""
    library = sys.modules.get("transformer_engine.pytorch")
    if library is None:
        return False
    kinds = tuple(
        getattr(library, name)
        for name in ("Linear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "TransformerLayer", "RMSNorm")
        if hasattr(library, name)
    )
    return any(isinstance(layer, kinds) for layer in model.modules())


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> nn.Module:
    """Replace linear and LayerNorm layers by transformer-engine's, or back, in place.

    Linear layers whose sizes do not divide by 16 stay, and so do subclasses with a forward of their own, LayerNorms
    without weight and bias, and those over several dimensions.

    Args:
        to_transformer_engine: False converts back.

    Returns:
        The model: itself, or its replacement if it is such a layer. Parameters stay the same objects, so optimizers
        and tied weights keep theirs.

    Raises:
        ImportError: transformer-engine is not installed.
    """
    te = _library("pytorch")
    convert_linear = _to_te_linear if to_transformer_engine else _from_te_linear
    convert_norm = _to_te_norm if to_transformer_engine else _from_te_norm

    def replacement(layer: nn.Module) -> nn.Module | None:
        new = convert_linear(te, layer) if _convert_linear else None
        return convert_norm(te, layer) if new is None and _convert_ln else new

    done: dict[nn.Module, nn.Module] = {}  # a layer that is used in two places stays one
    for parent in list(model.modules()):
        for name, layer in list(vars(parent)["_modules"].items()):  # each of its names, unlike named_children
            new = None if layer is None else done.get(layer) or replacement(layer)
            if new is not None:
                done[layer] = new
                setattr(parent, name, new)
    return replacement(model) or model


def _with_parameters(new: nn.Module, old: nn.Module) -> nn.Module:
    """`new` with the parameters, hooks and mode of `old`."""
    for name, parameter in old.named_parameters(recurse=False):
        setattr(new, name, parameter)
    return take_over(new, old)


def _to_te_linear(te: Any, layer: nn.Module) -> nn.Module | None:
    if type(layer) is not nn.Linear or layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
        return None
    new: nn.Module = te.Linear(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        params_dtype=layer.weight.dtype,
        device=layer.weight.device,
    )
    return _with_parameters(new, layer)


def _to_te_norm(te: Any, layer: nn.Module) -> nn.Module | None:
    if type(layer) is not nn.LayerNorm or layer.weight is None or layer.bias is None:
        return None
    if len(layer.normalized_shape) != 1:
        return None
    # no type: releases call the argument differently, and the parameters are the old layer's anyway
    new: nn.Module = te.LayerNorm(layer.normalized_shape[0], eps=layer.eps, device=layer.weight.device)
    return _with_parameters(new, layer)


def _from_te_linear(te: Any, layer: Any) -> nn.Module | None:
    if type(layer) is not te.Linear:
        return None
    has_bias = "bias" in dict(layer.named_parameters(recurse=False))
    new = nn.Linear(layer.in_features, layer.out_features, bias=has_bias, device="meta")
    return _with_parameters(new, layer)


def _from_te_norm(te: Any, layer: Any) -> nn.Module | None:
    if type(layer) is not te.LayerNorm:
        return None
    new = nn.LayerNorm(layer.weight.shape[0], eps=layer.eps, device="meta")
    return _with_parameters(new, layer)


# ---------------------------------------------------------------- the block that forward runs in


@dataclass(frozen=True)
class TransformerEngineContext:
    """The block in which layers compute in 8 bits, by whether the model trains.

    Args:
        recipe: of `transformer_engine.common.recipe`.
        during_eval: compute so in evaluation too.
    """

    recipe: Any
    during_eval: bool = False

    def __call__(self, training: bool) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._enter(enabled=training or self.during_eval)
        return context

    @cached_property
    def _enter(self) -> Callable[..., Any]:
        """The library's context manager; newer releases call it `autocast`."""
        te = _library("pytorch")
        if hasattr(te, "autocast"):
            return lambda enabled: te.autocast(enabled=enabled, recipe=self.recipe)
        return lambda enabled: te.fp8_autocast(enabled=enabled, fp8_recipe=self.recipe)

    def __getstate__(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "during_eval": self.during_eval}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """A forward that runs in 8 bits while its model trains.

    Args:
        model_forward: a bound method of the model, or a function that gets the model first.
        fp8_recipe: of `transformer_engine.common.recipe`.
        use_during_eval: compute so in evaluation too.
    """
    return _InFp8(model_forward, TransformerEngineContext(fp8_recipe, use_during_eval))


class _InFp8:
    """A forward in the block of a context. Copies with its model, as the forward does."""

    __wrapped__: Callable[..., Any]

    def __init__(self, forward: Callable[..., Any], context: TransformerEngineContext) -> None:
        self._context = context
        update_wrapper(self, forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = getattr(self.__wrapped__, "__self__", args[0] if args else None)
        with self._context(bool(getattr(model, "training", True))):
            return self.__wrapped__(*args, **kwargs)


def apply_fp8_autowrap(model: M, fp8_recipe_handler: TERecipeKwargs | None) -> M:
    """Make the forward of a converted model run in 8 bits; the same object is returned.

    Args:
        fp8_recipe_handler: None takes the defaults.
    """
    context = TransformerEngine(fp8_recipe_handler or TERecipeKwargs()).forward_context
    forward = vars(model).get("forward") or WeakMethod(model, "forward")
    vars(model)["forward"] = contextual_fp8_autocast(forward, context.recipe, context.during_eval)
    return model


# ---------------------------------------------------------------- the backend


@dataclass(frozen=True)
class TransformerEngine:
    """The backend. Runs on NVIDIA GPUs of compute capability 8.9 or more.

    Args:
        recipe: how scales are found, and in which format.
    """

    recipe: TERecipeKwargs

    kind = FP8BackendType.TE

    def obstacle(self, device: torch.device, /) -> str | None:
        """Why it cannot compute on this device, and what to do; None where it can."""
        ways_out = "use mixed_precision='bf16', or torchao (AORecipeKwargs), which also runs on the CPU."
        if device.type != "cuda":
            return f"fp8 by transformer-engine runs on NVIDIA GPUs, not on {str(device)!r}: {ways_out}"
        if not check_cuda_fp8_capability():
            return f"fp8 by transformer-engine needs a GPU of compute capability 8.9 or more: {ways_out}"
        if self.recipe.scaling == "mxfp8" and not is_transformer_engine_mxfp8_available():
            return (
                "mxfp8 scaling needs a GPU of compute capability 10 or more: leave use_mxfp8_block_scaling out, or "
                "use TERecipeKwargs(recipe='block')."
            )
        return None

    def convert(self, model: nn.Module, /, *, sharded: bool = False) -> nn.Module:  # noqa: ARG002  sharded or not
        """See `convert_model`; a model that holds layers of the library is left as its owner made it."""
        if has_transformer_engine_layers(model):
            return model
        converted = convert_model(model)
        if not has_transformer_engine_layers(converted):
            warnings.warn(
                f"no layer of {type(model).__name__} computes in fp8: it has no linear layer whose sizes divide by "
                f"{MULTIPLE}, and no LayerNorm.",
                stacklevel=2,
            )
        return converted

    @cached_property
    def forward_context(self) -> TransformerEngineContext:
        """The block that forward runs in, its recipe built once."""
        return TransformerEngineContext(self._built(), bool(self.recipe.use_autocast_during_eval))

    def _built(self) -> Any:
        scaling = self.recipe.scaling
        if scaling is None:
            return self.recipe.recipe
        library = _library("common.recipe")
        name = _CLASSES[scaling]
        if not hasattr(library, name):
            raise PrecisionError(
                f"the installed transformer-engine has no {name}, which {scaling!r} scaling needs: install a newer "
                "one, or leave the recipe at 'delayed'."
            )
        return getattr(library, name)(**self._options(library, name, scaling))

    def _options(self, library: Any, name: str, scaling: str) -> dict[str, Any]:
        format_ = getattr(library.Format, str(self.recipe.fp8_format))
        if scaling != "delayed":  # HYBRID is what is asked for when nobody says anything: these know better
            return {} if self.recipe.fp8_format == "HYBRID" else {"fp8_format": format_}
        known = inspect.signature(getattr(library, name)).parameters
        options = {"fp8_format": format_}
        for option, default in DELAYED_DEFAULTS.items():
            value = getattr(self.recipe, option)
            if option in known:
                options[option] = value
            elif value != default:
                raise PrecisionError(
                    f"{option}={value!r} cannot be honoured: the installed transformer-engine no longer has it. Leave "
                    "it out."
                )
        return options

    def describe(self) -> str:
        """In a few words."""
        scaling = self.recipe.scaling or type(self.recipe.recipe).__name__
        return f"linear layers and LayerNorms in fp8 by transformer-engine, {scaling} scaling"
