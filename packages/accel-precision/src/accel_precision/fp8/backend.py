"""Who computes in 8-bit floats, and the choice among them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from accel_state import is_torchao_available, is_transformer_engine_available
from accel_state.errors import MissingExtraError, PrecisionError
from accel_state.settings import resolve

from .recipes import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, Recipe, TERecipeKwargs

ForwardContext = Callable[[bool], AbstractContextManager[None]]
"""From whether the model is training to the block that its forward runs in. Pickles."""


class FP8BackendType(enum.StrEnum):
    """The libraries by which users ask for 8-bit floats; NO without."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class Fp8Backend(Protocol):
    """A library that trains in 8-bit floats. Satisfied by shape.

    Attributes:
        kind: its name.
        recipe: what it was told.
        forward_context: what a converted model's forward has to run in beside autocast; None for nothing.
    """

    @property
    def kind(self) -> FP8BackendType: ...
    @property
    def recipe(self) -> Any: ...
    @property
    def forward_context(self) -> ForwardContext | None: ...

    def obstacle(self, device: torch.device, /) -> str | None:
        """Why it cannot compute on this device, and what to do; None where it can."""
        ...

    def convert(self, model: nn.Module, /, *, sharded: bool = False) -> nn.Module:
        """The model with those layers replaced that are to compute in 8 bits; parameters stay the same objects."""
        ...

    def describe(self) -> str:
        """In a few words, for `Plan.explain`."""
        ...


def fp8_backend(recipe: Recipe | None = None) -> Fp8Backend:
    """The library that a recipe is for.

    Args:
        recipe: None takes the one that the setting `fp8_backend` names, else transformer-engine where it is installed,
            else torchao.

    Raises:
        MissingExtraError: the library, or any, is not installed; says how to install it.
        PrecisionError: an unknown name, or MS-AMP, which is no longer published.
    """
    recipe = _default_recipe() if recipe is None else recipe
    if isinstance(recipe, FP8RecipeKwargs):
        recipe = recipe.specific()
    if isinstance(recipe, MSAMPRecipeKwargs):
        raise PrecisionError(
            "fp8 by MS-AMP cannot be had: it is no longer published and knows no torch of today. Use "
            "AORecipeKwargs (torchao) or TERecipeKwargs (transformer-engine), or mixed_precision='bf16'."
        )
    if isinstance(recipe, AORecipeKwargs):
        if not is_torchao_available():
            raise MissingExtraError(
                "fp8 by torchao needs torchao, which is not installed: pip install 'accel-precision[torchao]', or use "
                "mixed_precision='bf16'."
            )
        from .ao import TorchAo

        return TorchAo(recipe)
    if not is_transformer_engine_available():
        raise MissingExtraError(
            "fp8 by transformer-engine needs transformer-engine, which is not installed with its part for torch: pip "
            "install --no-build-isolation 'transformer-engine[pytorch]' (it is built for the CUDA at hand), use "
            "torchao (AORecipeKwargs), or mixed_precision='bf16'."
        )
    from .te import TransformerEngine

    return TransformerEngine(recipe)


def _default_recipe() -> Recipe:
    name, origin = resolve("fp8_backend")
    if name is None:
        if is_transformer_engine_available():
            return TERecipeKwargs()
        if is_torchao_available():
            return AORecipeKwargs()
        raise MissingExtraError(
            "mixed_precision='fp8' needs a library that computes in it, and none is installed: pip install "
            "'accel-precision[torchao]', or transformer-engine on NVIDIA GPUs, or use mixed_precision='bf16'."
        )
    recipes: dict[str, Callable[[], Recipe]] = {"AO": AORecipeKwargs, "TE": TERecipeKwargs, "MSAMP": MSAMPRecipeKwargs}
    if name.upper() not in recipes:
        raise PrecisionError(f"fp8_backend={name!r} ({origin}) is not allowed: use one of {[*recipes]}.")
    return recipes[name.upper()]()


M = TypeVar("M", bound=nn.Module)

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)


def take_over(layer: M, old: nn.Module) -> M:
    """Give a layer that replaces another one the hooks and the mode of that."""
    layer.train(old.training)
    for name in _HOOKS:
        vars(layer)[name] = vars(old)[name]
    return layer
