"""8-bit floats by torchao: linear layers that cast to them around each matrix product."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel_state import check_cuda_fp8_capability
from accel_state.errors import PrecisionError

from .backend import FP8BackendType, take_over
from .recipes import AORecipeKwargs, ModuleFilter

MULTIPLE = 16
"""Matrix products in 8 bits need dimensions that divide by it."""


def _library() -> Any:
    """`torchao.float8`; what the library warns of itself while it is imported is not our users' affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("torchao.float8")


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Whether a layer is to compute in 8 bits: all but the first and the last linear one, which need the precision.

    Args:
        module: the whole model; or the layer, as torchao calls filters: a layer cannot tell its place, so that it is
            only asked for its sizes. `convert_model_to_fp8_ao` asks with the model.
        fqn: the layer's name in the model.

    Layers whose sizes do not divide by 16, and subclasses of `Linear` with a forward of their own, are left out too.
    """
    if type(module) is nn.Linear:
        return _has_fitting_sizes(module)
    return fqn in _inner_linear_layers(module)


def _inner_linear_layers(model: nn.Module) -> frozenset[str]:
    linear = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return frozenset(name for name, layer in linear[1:-1] if _has_fitting_sizes(layer))


def _has_fitting_sizes(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0


def has_ao_layers(model: nn.Module) -> bool:
    """Whether torchao has put 8-bit layers into the model."""
    library = sys.modules.get("torchao.float8.float8_linear")
    return library is not None and any(isinstance(layer, library.Float8Linear) for layer in model.modules())


def convert_model_to_fp8_ao(
    model: nn.Module,
    config: Any = None,
    module_filter_func: ModuleFilter | None = filter_first_and_last_linear_layers,
) -> nn.Module:
    """Replace linear layers by ones that compute in 8 bits, in place.

    Args:
        model: layers that torchao has converted before stay as they are.
        config: torchao's `Float8LinearConfig`; by default with `pad_inner_dim=True`.
        module_filter_func: `(layer, name) -> bool`; None takes the default.

    Returns:
        The model: itself, or its replacement if it is a linear layer. Parameters stay the same objects, so optimizers
        and tied weights keep theirs, unless `config.enable_fsdp_float8_all_gather` wraps them.

    Raises:
        ImportError: torchao is not installed.
    """
    library = _library()
    chosen = _chooser(model, module_filter_func)
    old = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    config = library.Float8LinearConfig(pad_inner_dim=True) if config is None else config
    converted: nn.Module = library.convert_to_float8_training(model, module_filter_fn=chosen, config=config)
    replaced = [(layer, old[name]) for name, layer in converted.named_modules() if old.get(name) not in (None, layer)]
    for layer, before in replaced:
        take_over(layer, before)
    if not replaced and not has_ao_layers(converted):
        warnings.warn(
            f"no layer of {type(model).__name__} computes in fp8: its filter leaves all out. By default those are the "
            "first and the last linear layer and sizes that do not divide by 16; pass AORecipeKwargs(module_filter_func"
            "=...) to choose.",
            stacklevel=2,
        )
    return converted


def _chooser(model: nn.Module, choose: ModuleFilter | None) -> Callable[[nn.Module, str], bool]:
    """The filter as torchao calls it, which passes over layers that are converted already."""
    if choose is None or choose is filter_first_and_last_linear_layers:
        inner = _inner_linear_layers(model)
        return lambda _layer, name: name in inner
    return lambda layer, name: not has_ao_layers(layer) and choose(layer, name)


@dataclass(frozen=True)
class TorchAo:
    """The backend. Runs on NVIDIA and AMD GPUs with 8-bit units, on the CPU, and anywhere by emulation.

    Args:
        recipe: what to convert, and how.
    """

    recipe: AORecipeKwargs

    kind = FP8BackendType.AO
    forward_context = None

    def obstacle(self, device: torch.device, /) -> str | None:
        """Why it cannot compute on this device, and what to do; None where it can."""
        if device.type == "cpu" or getattr(self.recipe.config, "emulate", False):
            return None
        if device.type == "cuda" and check_cuda_fp8_capability():
            return None
        reason = "needs a GPU of compute capability 8.9 or more" if device.type == "cuda" else "has no 8-bit products"
        return (
            f"fp8 by torchao on {str(device)!r} {reason}: use mixed_precision='bf16', or, to see its numbers slowly, "
            "AORecipeKwargs(config=Float8LinearConfig(emulate=True))."
        )

    def convert(self, model: nn.Module, /, *, sharded: bool = False) -> nn.Module:
        """See `convert_model_to_fp8_ao`; a model that holds layers of torchao is left as its owner made it."""
        if has_ao_layers(model):
            return model
        return convert_model_to_fp8_ao(model, self._config(sharded), self.recipe.module_filter_func)

    def _config(self, sharded: bool) -> Any:
        config_class = _library().Float8LinearConfig
        gather = bool(self.recipe.enable_fsdp_float8_all_gather) and sharded  # it wraps parameters, so only then
        if self.recipe.config is None:
            return config_class(pad_inner_dim=bool(self.recipe.pad_inner_dim), enable_fsdp_float8_all_gather=gather)
        if not isinstance(self.recipe.config, config_class):
            raise PrecisionError(
                f"AORecipeKwargs.config is a {type(self.recipe.config).__name__}: give a "
                "torchao.float8.Float8LinearConfig."
            )
        return dataclasses.replace(self.recipe.config, enable_fsdp_float8_all_gather=gather)

    def describe(self) -> str:
        """In a few words."""
        return "linear layers in fp8 by torchao"
