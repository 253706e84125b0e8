"""How many bytes a model's tensors take, and how many each device has."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from accel_state.devices import detect_kind
from accel_state.errors import DeviceMapError

from .module_tensors import named_module_tensors
from .numbers import Dtype, as_dtype, convert_file_size_to_int, element_bytes

_log = logging.getLogger(__name__)

Memory = Mapping[int | str, int | str]
"""Device -> bytes, or a size such as "10GB"."""

MaxMemory = dict[int | str, int]

_USABLE = 0.9
"""Of an accelerator's free memory, in plans: the rest is for activations and fragments."""


def tensor_bytes(name: str, tensor: Tensor, dtype: Dtype | None, special_dtypes: Mapping[str, Dtype] | None) -> int:
    """Bytes of a tensor once it is loaded.

    Args:
        dtype: that floating-point weights will have, if it is smaller than theirs.
        special_dtypes: name of a tensor -> its dtype, whatever it is now.
    """
    if special_dtypes is not None and name in special_dtypes:
        size = element_bytes(special_dtypes[name])
    elif dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        size = tensor.element_size()
    else:
        size = min(element_bytes(dtype), tensor.element_size())
    return int(tensor.numel() * size)


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of every module and tensor by name, "" being the model. A shared tensor counts once, where it comes first.

    Args:
        dtype: that floating-point weights will be loaded in, if it is smaller than theirs.
        special_dtypes: name of a tensor -> the dtype that it will have.
        buffers_only: leave the parameters out.
    """
    dtype = None if dtype is None else as_dtype(dtype)
    sizes: dict[str, int] = defaultdict(int)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        size = tensor_bytes(name, tensor, dtype, special_dtypes)
        sizes[""] += size
        end = name.find(".")
        while end >= 0:
            sizes[name[:end]] += size
            end = name.find(".", end + 1)
        sizes[name] += size
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> int:
    """Bytes of all buffers; see `compute_module_sizes`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Collection[str] | None,
) -> tuple[int, list[str]]:
    """The largest layer among some modules, with the names of all that are as large.

    A layer is a module without submodules, a tensor, or a module of a class that is not split.

    Args:
        modules: name and module, or tensor.
        module_sizes: of `compute_module_sizes`.
        no_split_module_classes: names of classes.
    """
    kept = as_class_names(no_split_module_classes)
    largest, names = 0, []
    to_look_at = list(reversed(modules))
    while to_look_at:
        name, module = to_look_at.pop()
        children = [] if isinstance(module, Tensor) else list(module.named_children())
        if children and type(module).__name__ not in kept:
            assert isinstance(module, nn.Module)
            inside: list[tuple[str, nn.Module | Tensor]] = [*module.named_parameters(recurse=False), *children]
            to_look_at += reversed([(f"{name}.{part}" if name else part, held) for part, held in inside])
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def as_class_names(no_split_module_classes: Collection[str] | str | None) -> frozenset[str]:
    """Names of classes, of which users may give one, several or none."""
    if isinstance(no_split_module_classes, str):
        return frozenset([no_split_module_classes])
    return frozenset(no_split_module_classes or ())


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of a model, and its largest layer as `get_max_layer_size` gives it.

    Classes that transformers lists in `_no_split_modules` are not split.
    """
    sizes = compute_module_sizes(model)
    kept = getattr(model, "_no_split_modules", None) or []
    return sizes[""], get_max_layer_size(list(model.named_children()) or [("", model)], sizes, kept)


def get_max_memory(max_memory: Memory | None = None) -> MaxMemory:
    """What each device may hold, in bytes: accelerators by number, then "cpu", then "disk".

    Args:
        max_memory: devices, with bytes or sizes such as "10GB"; devices that are not there can be planned for and are
            logged. None means all that is here: nine tenths of what each accelerator has free, and the CPU's memory
            that programs can have.

    Raises:
        DeviceMapError: a device that no plan can have.
        SettingError: a size that is none.
    """
    if max_memory is None:
        return {**_free_on_accelerators(), "cpu": free_cpu_bytes()}
    sizes = {device: convert_file_size_to_int(size) for device, size in max_memory.items()}
    numbers = sorted(device for device in sizes if isinstance(device, int))
    names = [device for device in sizes if isinstance(device, str)]
    _check_names(names)
    there = detect_kind().device_count() if detect_kind().name != "cpu" else 0
    for number in numbers:
        if number >= there:
            _log.warning("Device %d is not available, available devices are %s", number, list(range(there)))
    others = [name for name in names if name not in ("cpu", "disk")]
    ordered = [*numbers, *others, *(name for name in ("cpu", "disk") if name in sizes)]
    return {device: sizes[device] for device in ordered}


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name == "disk":
            continue
        try:
            torch.device(name)
        except RuntimeError as error:
            raise DeviceMapError(
                f'max_memory names a device {name!r}: give an accelerator\'s number, "cpu", "disk" or a device of torch'
            ) from error


def _free_on_accelerators() -> MaxMemory:
    kind = detect_kind()
    if kind.name == "cpu":
        return {}
    if kind.name == "mps":
        return {"mps": free_cpu_bytes()}  # shared with the CPU
    free: MaxMemory = {}
    for number in range(kind.device_count()):
        torch.empty(0, device=torch.device(kind.name, number))  # the device's own context takes memory too
        found = kind.call("mem_get_info", number)
        if found is None:
            raise DeviceMapError(f"the free memory of {kind.name} devices cannot be asked for here: give max_memory")
        free[number] = int(found[0] * _USABLE)
    return free


def free_cpu_bytes() -> int:
    """Memory that programs can have without swapping, as far as the system tells, else all that there is."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
