"""Tensors that several modules share."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .device_maps import place_of

_log = logging.getLogger(__name__)


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Groups of names under which one parameter is known, in the model's order.

    Args:
        kwargs: none; older callers pass the parts of a walk, which is not needed.
    """
    del kwargs
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Give every name of a group the same parameter: the first that has numbers, else the first.

    Args:
        tied_params: as `find_tied_parameters` returns.
    """
    for group in tied_params:
        owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in group]
        held = [getattr(owner, name, None) for owner, name in owners]
        found = [parameter for parameter in held if parameter is not None]
        if not found:
            continue
        kept = next((parameter for parameter in found if not parameter.is_meta), found[0])
        for owner, name in owners:
            owner._parameters[name] = kept  # noqa: SLF001 - also where the slot is None


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether a transformers model's configuration says that its weights are tied."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda **_: config)(decoder=True)
    return bool(
        (getattr(text, "tie_word_embeddings", False) and _has_output_embeddings(model))
        or (getattr(config, "tie_encoder_decoder", False) and getattr(config, "is_encoder_decoder", False))
        or any(hasattr(module, "_tie_weights") for module in model.modules())
    )


def _has_output_embeddings(model: nn.Module) -> bool:
    output = getattr(model, "get_output_embeddings", None)
    return output is None or output() is not None


def check_tied_parameters_on_same_device(tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Log a warning for each group whose members a device map puts on several devices."""
    for group in tied_params:
        places = {name: place_of(name, device_map) for name in group}
        if len(set(map(str, places.values()))) > 1:
            _log.warning(
                "Tied parameters are on different devices: %s. Give them one in the map, or use device_map='auto'.",
                places,
            )


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """What two tensors with the same memory have in common: device, address, bytes.

    Tensors without memory (meta) have the address of their storage object.
    """
    storage = tensor.untyped_storage()
    return tensor.device, storage._cdata if tensor.is_meta else storage.data_ptr(), storage.nbytes()  # noqa: SLF001
