"""Models whose weights lie in several places: accelerators, the CPU's memory, and files."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accel_state.errors import DeviceMapError, OffloadError

from .align import AlignDevicesHook, Device
from .attach import Attaching, Place, attach_by_places
from .device_maps import OFFLOADED, check_device_map, find_entry, place_of
from .hooks import add_hook_to_module
from .module_tensors import TiedMap, has_offloaded_params, set_module_tensor_to_device
from .numbers import any_to_device
from .offload_files import (
    INDEX_NAME,
    OffloadedWeightsLoader,
    make_offload_folder,
    offload_state_dict,
    read_offload_index,
)
from .placeholders import OffloadedWeight
from .ties import check_tied_parameters_on_same_device, find_tied_parameters, retie_parameters

Model = TypeVar("Model", bound=nn.Module)
Folder = str | os.PathLike[str]


def cpu_offload(
    model: Model,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> Model:
    """Keep a model's weights in the CPU's memory, and bring those of each layer to a device for its forward.

    Args:
        execution_device: where layers compute; None takes that of the first parameter.
        offload_buffers: whether buffers are offloaded too.
        state_dict: the weights on the CPU, where they are there already.
        preload_module_classes: names of classes whose modules bring the weights of all their submodules at once: those
            that read submodules' weights without calling them.

    Returns:
        The model, changed in place.
    """
    if state_dict is None:
        state_dict = {name: tensor.to("cpu") for name, tensor in _values(model, offload_buffers).items()}
    _require_all(model, state_dict, "state_dict")
    _offload_all(model, execution_device, offload_buffers, state_dict, preload_module_classes)
    return model


def disk_offload(
    model: Model,
    offload_dir: Folder,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] | None = None,
) -> Model:
    """Write a model's weights to files, and bring those of each layer to a device for its forward.

    Args:
        offload_dir: a directory, which is made, for the weights; those of a model on the meta device have to be in it
            already (`offload_state_dict`).
        execution_device, offload_buffers, preload_module_classes: see `cpu_offload`.

    Returns:
        The model, changed in place.

    Raises:
        OffloadFolderError: the directory cannot be written.
        OffloadError: some weights have no numbers, here or there.
    """
    folder = make_offload_folder(offload_dir)
    offload_state_dict(folder, _values(model, offload_buffers))
    weights = OffloadedWeightsLoader(save_folder=folder, index=_index_of(folder))
    _require_all(model, weights, str(folder))
    _offload_all(model, execution_device, offload_buffers, weights, preload_module_classes)
    return model


def _offload_all(
    model: nn.Module,
    execution_device: Device | None,
    offload_buffers: bool,
    weights: Mapping[str, Tensor],
    preload: Collection[str] | None,
) -> None:
    if execution_device is None:
        first = next(model.parameters(), torch.empty(0)).device
        execution_device = torch.device("cpu") if first.type == "meta" else first
    tied = find_tied_parameters(model)
    attaching = Attaching(weights_map=weights, offload_buffers=offload_buffers, preload=preload or ())
    root = AlignDevicesHook(io_same_device=True)
    root.prefetcher = attaching.prefetcher
    add_hook_to_module(model, root, append=True)
    attaching.stored(model, "", execution_device)
    attaching.done()
    retie_parameters(model, tied)


def dispatch_model(
    model: Model,
    device_map: Mapping[str, Any],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: Folder | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
) -> Model:
    """Put each part of a model where a device map says, and attach the hooks that let it run like that.

    Weights on "disk", and those on "cpu" if an accelerator computes, are brought to the main device for the forward of
    their layer. The model's `hf_device_map` is the map.

    Args:
        device_map: name of a module or tensor -> an accelerator's number, "cpu", "disk" or a device.
        main_device: where offloaded layers compute; None takes the first accelerator in the map, else the CPU.
        state_dict: the weights that stay on the CPU, where the model itself lacks them.
        offload_dir: a directory for the weights on disk. Those that the model has are written there; the others have to
            be there already, or in `offload_index`.
        offload_index: entries for weights on disk, as `OffloadedWeightsLoader` takes them.
        offload_buffers: whether buffers of offloaded layers are offloaded too.
        skip_keys: names of inputs that are not moved.
        preload_module_classes: see `cpu_offload`.
        force_hooks: attach hooks even if all is on one device.

    Returns:
        The model, changed in place.

    Raises:
        DeviceMapError: the map misses parameters, or weights on disk have no place given.
        OffloadFolderError: the directory cannot be written.
        OffloadError: weights that have no numbers anywhere; lists them.
    """
    check_device_map(model, device_map)
    distinct = {str(device) for device in device_map.values()}
    if len(distinct) == 1 and "disk" not in distinct and not force_hooks:
        _fill(model, state_dict or {}, device_map)
        _require_all(model, {}, "state_dict")
        model.to(any_to_device(next(iter(device_map.values()))))
        model.hf_device_map = dict(device_map)  # type: ignore[assignment] # users and clients read it
        return model
    if main_device is None:
        main_device = next((device for device in device_map.values() if device not in OFFLOADED), "cpu")
    places = {name: _place(device, main_device) for name, device in device_map.items()}
    tied = find_tied_parameters(model)
    check_tied_parameters_on_same_device(tied, device_map)
    weights = _stored_weights(model, places, device_map, state_dict or {}, offload_dir, offload_index, offload_buffers)
    _fill(model, state_dict or {}, {n: d for n, d in device_map.items() if not places[n].is_stored})
    _require_all(model, weights, "state_dict or offload_dir")
    attaching = Attaching(
        weights_map=weights,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload=preload_module_classes or (),
        tied_params_map=_tied_map(model, tied),
    )
    attach_by_places(model, places, attaching, main_device)
    retie_parameters(model, _on_one_place(tied, device_map))
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    _guard_moves(model)
    return model


def _place(device: Any, main_device: Device) -> Place:
    if device == "disk" or (device == "cpu" and any_to_device(main_device).type != "cpu"):
        return Place(main_device, True)
    return Place(device, False)


def _tied_map(model: nn.Module, tied: list[list[str]]) -> TiedMap:
    first = [model.get_parameter(names[0]) for names in tied]
    return {parameter.data_ptr(): {} for parameter in first if not parameter.is_meta}


def _on_one_place(tied: list[list[str]], device_map: Mapping[str, Any]) -> list[list[str]]:
    return [names for names in tied if len({str(place_of(name, device_map)) for name in names}) == 1]


# ---- where the numbers are


def _values(model: nn.Module, with_buffers: bool = True) -> dict[str, Tensor]:
    """What a model has numbers of, by every name of it; buffers that no state dict has too."""
    found = {name: tensor.detach() for name, tensor in _named(model) if not tensor.is_meta}
    if with_buffers:
        return found
    return {name: found[name] for name, _ in model.named_parameters(remove_duplicate=False) if name in found}


def _stored_weights(
    model: nn.Module,
    places: Mapping[str, Place],
    device_map: Mapping[str, Any],
    state_dict: Mapping[str, Tensor],
    offload_dir: Folder | None,
    offload_index: Mapping[str, Any] | None,
    with_buffers: bool,
) -> OffloadedWeightsLoader:
    """All that is stored: what goes to the CPU in memory, what goes to disk in files, which are written now."""
    values = {**state_dict, **_values(model, with_buffers)}
    stored = {name: tensor for name, tensor in values.items() if find_entry(name, places) is not None}
    stored = {name: tensor for name, tensor in stored.items() if place_of(name, places).is_stored}
    on_disk = {name: tensor for name, tensor in stored.items() if place_of(name, device_map) == "disk"}
    in_memory = {name: tensor.detach().to("cpu") for name, tensor in stored.items() if name not in on_disk}
    index = dict(offload_index or {})
    to_write = {name: tensor for name, tensor in on_disk.items() if name not in index}
    if offload_dir is None:
        if to_write:
            names = ", ".join(name for name, device in device_map.items() if device == "disk")
            raise DeviceMapError(
                "We need an `offload_dir` to dispatch this model according to this `device_map`, the following "
                f"submodules need to be offloaded: {names}."
            )
        return OffloadedWeightsLoader(in_memory, None, index)
    if "disk" in device_map.values():
        folder = make_offload_folder(offload_dir)
        offload_state_dict(folder, to_write)
        index = {**_index_of(folder), **index}
    return OffloadedWeightsLoader(in_memory, offload_dir, index)


def _index_of(folder: Path) -> dict[str, Any]:
    return read_offload_index(folder) if Path(folder, INDEX_NAME).exists() else {}


def _fill(model: nn.Module, state_dict: Mapping[str, Tensor], device_map: Mapping[str, Any]) -> None:
    """Give tensors without numbers those of a state dict, on the devices of a map."""
    for name, tensor in _named(model):
        if tensor.is_meta and name in state_dict and find_entry(name, device_map) is not None:
            set_module_tensor_to_device(model, name, place_of(name, device_map), value=state_dict[name])


def _require_all(model: nn.Module, weights: Mapping[str, Any], where: str) -> None:
    """No tensor may be without numbers.

    Raises:
        OffloadError: lists those that are.
    """
    known = {id(tensor) for name, tensor in _named(model) if name in weights}
    empty = [
        name
        for name, tensor in _named(model)
        if tensor.is_meta and id(tensor) not in known and not isinstance(tensor, OffloadedWeight)
    ]
    if empty:
        shown = ", ".join(empty[:10]) + (f" and {len(empty) - 10} more" if len(empty) > 10 else "")
        raise OffloadError(
            f"{shown} of {type(model).__name__} have no numbers: they are on the meta device, and not in {where}. Load "
            "them first, for example by load_checkpoint_and_dispatch"
        )


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


# ---- moving a dispatched model


class _MoveOfDispatched:
    """`model.to` or `model.cuda` of a dispatched model: refused while weights are offloaded."""

    def __init__(self, model: nn.Module, own: Any) -> None:
        self.model, self.own = model, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(has_offloaded_params(module) for module in self.model.modules()):
            raise OffloadError(
                "You can't move a model that has some modules offloaded to cpu or disk. Dispatch it by another "
                "device_map, or bring its weights back by remove_hook_from_submodules(model) first"
            )
        return self.own(*args, **kwargs)


def _guard_moves(model: nn.Module) -> None:
    for name in ("to", "cuda", "cpu", "xpu"):
        own = getattr(model, name, None)
        if own is not None and not isinstance(own, _MoveOfDispatched):
            setattr(model, name, functools.update_wrapper(_MoveOfDispatched(model, own), own))
