"""Hooks that move whole models between an accelerator and the CPU, for pipelines of several models."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from accel_state import send_to_device
from accel_state.devices import choose_device, detect_kind, device_kind

from .align import Device
from .hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from .numbers import any_to_device

Model = TypeVar("Model", bound=nn.Module)


class CpuOffload(ModelHook):
    """The model lies on the CPU until its forward, which brings it to a device, where it stays.

    Args:
        execution_device: where it computes; None takes this machine's first accelerator, else the CPU.
        prev_module_hook: of the model that runs before this one, which is sent back to the CPU first.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = (
            choose_device(detect_kind(), 0) if execution_device is None else any_to_device(execution_device)
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Sends the model to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Brings the model and its inputs."""
        if self.prev_module_hook is not None:
            previous = next(self.prev_module_hook.model.parameters(), torch.empty(0)).device
            self.prev_module_hook.offload()
            if previous.type != "cpu":
                device_kind(previous).empty_cache()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """What a user holds of a `CpuOffload`, to send the model back at other times.

    Args:
        model, hook: which were put together.
    """

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Send the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook away; the model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: Model, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[Model, UserCpuOffloadHook]:
    """Keep a model on the CPU until its forward, and then on a device until another model's turn.

    Quicker than `cpu_offload` for models that run several times in a row, and needs room for a whole model.

    Args:
        execution_device, prev_module_hook: of `CpuOffload`.

    Returns:
        The model, and what sends it back: give that as `prev_module_hook` of the next model, and call its `offload()`
        after the last one.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
