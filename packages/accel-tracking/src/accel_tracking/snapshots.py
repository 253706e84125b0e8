"""Values as they are now, for a thread that looks at them later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def snapshot(value: Any, devices: set[Any]) -> Any:
    """A copy that does not change when training goes on: of mappings, lists, tensors and arrays; the rest as it is.

    A tensor is copied where it lies, which does not wait for its device.

    Args:
        value: anything.
        devices: gets the devices of the tensors that do not lie on the CPU; see `wait_for`.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {key: snapshot(item, devices) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(snapshot(item, devices) for item in value)
    if hasattr(value, "detach") and hasattr(value, "device"):
        if value.device.type != "cpu":
            devices.add(value.device)
        return value.detach().clone()
    if hasattr(value, "dtype") and hasattr(value, "copy"):
        return value.copy()
    return value


def wait_for(devices: set[Any]) -> None:
    """Wait until the copies of `snapshot` are made, whichever stream makes them."""
    if devices:
        import torch

        for device in devices:
            if torch.accelerator.is_available() and device.type == torch.accelerator.current_accelerator().type:  # type: ignore[union-attr]
                torch.accelerator.synchronize(device)
