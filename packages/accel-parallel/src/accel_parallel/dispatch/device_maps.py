"""Device maps: name of a module or tensor -> device, where the longest name that leads to a tensor counts.

Devices are an accelerator's number, "cpu", "disk", or anything `torch.device` takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn

from accel_state.callsite import warn_user
from accel_state.errors import DeviceMapError

DeviceMap = Mapping[str, Any]

OFFLOADED = ("cpu", "disk")
"""Devices of a map that store, where another one computes."""


def find_entry(name: str, device_map: DeviceMap) -> str | None:
    """The key of a map that counts for a tensor or module; None if none does."""
    while True:
        if name in device_map:
            return name
        if not name:
            return None
        name = name.rpartition(".")[0]


def place_of(name: str, device_map: DeviceMap) -> Any:
    """The device that a map gives a tensor or module.

    Raises:
        DeviceMapError: it gives none.
    """
    entry = find_entry(name, device_map)
    if entry is None:
        raise DeviceMapError(f"{name} has no device in the device_map, whose names are {_listed(device_map)}")
    return device_map[entry]


def check_device_map(model: nn.Module, device_map: DeviceMap) -> None:
    """Whether a map gives every tensor of a model a device; warns of names that mean nothing in the model.

    Raises:
        DeviceMapError: it misses some; lists them.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    known = {name for name, _ in model.named_modules(remove_duplicate=False)} | set(names)
    unknown = [name for name in device_map if name not in known]
    if unknown:
        warn_user(f"The following device_map keys do not match any submodules in the model: {unknown}")
    missing = [name for name in names if find_entry(name, device_map) is None]
    if missing:
        shown = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        raise DeviceMapError(
            f"The device_map provided does not give any device for the following parameters: {shown}. Name them or "
            'their modules in it, or give "" a device, which counts for all that nothing else names.'
        )


def clean_device_map(device_map: MutableMapping[str, Any], module_name: str = "") -> MutableMapping[str, Any]:
    """Join entries: where all names inside a module have one device, the module's name alone remains. In place.

    Args:
        module_name: join inside this module only.
    """
    prefix = f"{module_name}." if module_name else ""
    own = {name: device_map.pop(name) for name in list(device_map) if name.startswith(prefix)}
    rank = {name: index for index, name in enumerate(own)}
    parts_of = _parts(own, module_name)
    for parent in sorted(parts_of, key=lambda name: -(name.count(".") + bool(name))):  # the deepest first
        parts = parts_of[parent]
        if parent in own or not all(part in own for part in parts) or len({str(own[part]) for part in parts}) > 1:
            continue
        rank[parent] = min(rank[part] for part in parts)
        own[parent] = own[parts[0]]
        for part in parts:
            del own[part]
    device_map.update({name: own[name] for name in sorted(own, key=rank.__getitem__)})
    return device_map


def _parts(names: Iterable[str], root: str) -> dict[str, list[str]]:
    """Module -> the names directly in it, for all modules up to `root` that lead to some names."""
    found: dict[str, dict[str, None]] = {}
    for name in names:
        while name != root:
            parent = name.rpartition(".")[0]
            is_new = name not in found.setdefault(parent, {})
            found[parent][name] = None
            if not is_new:
                break
            name = parent
    return {parent: list(parts) for parent, parts in found.items()}


def has_several_devices(model: nn.Module) -> bool:
    """Whether a model, or a module in it, was dispatched over more than one device."""
    return any(len(getattr(module, "hf_device_map", None) or ()) > 1 for module in model.modules())


def extract_submodules_state_dict(
    state_dict: Mapping[str, Tensor], submodule_names: Iterable[str]
) -> dict[str, Tensor]:
    """The entries of a state dict that belong to some modules, or tensors, by name."""
    wanted = set(submodule_names)
    if "" in wanted:
        return dict(state_dict)
    return {name: tensor for name, tensor in state_dict.items() if find_entry(name, dict.fromkeys(wanted)) is not None}


def _listed(device_map: DeviceMap) -> str:
    names = [repr(name) for name in device_map]
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "") if names else "none (it is empty)"
