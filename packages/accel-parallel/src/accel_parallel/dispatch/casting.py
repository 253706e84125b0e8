"""Weights stored in a small dtype and computed with in a larger one, a layer at a time."""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .hooks import ModelHook, add_hook_to_module

SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
"""Layers whose weights can be stored in another dtype than they compute in."""


class LayerwiseCastingHook(ModelHook):
    """Before a module's forward its floating-point weights are copied into another dtype; the copies go after it.

    Gradients reach the stored weights through the copies, where they require any.

    Args:
        storage_dtype: that the weights have between forwards.
        compute_dtype: that they have in the forward.
        non_blocking: do not wait for copies between devices.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking
        self._stored: list[tuple[MutableMapping[str, Tensor], str, Tensor]] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Stores the weights in the storage dtype."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Puts copies in the weights' places."""
        for part in module.modules():
            for held in (part._parameters, part._buffers):  # noqa: SLF001 - the places themselves are what changes
                places: Any = held
                for name, tensor in places.items():
                    if tensor is not None and tensor.is_floating_point():
                        self._stored.append((places, name, tensor))
                        places[name] = tensor.to(self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Puts the weights back; what the forward changed in buffers is kept."""
        self.forward_failed(module)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Puts the weights back."""
        del module
        with torch.no_grad():
            for places, name, tensor in self._stored:
                if not isinstance(tensor, nn.Parameter):
                    tensor.copy_(places[name])
                places[name] = tensor
        self._stored = []


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in a small dtype, such as `torch.float8_e4m3fn`.

    Memory falls with the dtype's size, and each forward of such a layer casts its weights.

    Args:
        module: the model, or a layer.
        storage_dtype, compute_dtype, non_blocking: of `LayerwiseCastingHook`.
        skip_modules_pattern: regular expressions, one or several, searched for in modules' names: what is found is left
            alone with all inside. Layers that are sensitive to small dtypes (norms, embeddings, the last projection).
        skip_modules_classes: classes that are left alone with all inside.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())
    skipped = tuple(skip_modules_classes or ())

    def visit(name: str, part: nn.Module) -> None:
        if isinstance(part, skipped) or any(re.search(pattern, name) for pattern in patterns):
            return
        if isinstance(part, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(part, hook, append=True)
            return
        for key, child in part.named_children():
            visit(f"{name}.{key}" if name else key, child)

    visit("", module)
