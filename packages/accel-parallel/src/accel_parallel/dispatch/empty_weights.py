"""Models made without memory for their weights, or on another device from the start."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """A block in which modules are made without memory for their weights, on the meta device.

    Args:
        include_buffers: see `init_on_device`.
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: int | str | torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """A block in which parameters of modules that this thread makes go to a device as they are registered.

    Each parameter is made as its module makes it and then moved, so memory for one at a time is needed; modules that
    are initialised after their parameters are registered, as torch's are, are initialised on the device.

    Args:
        include_buffers: whether all tensors that are made in the block lie on the device, buffers among them; by
            default they keep their numbers, which a checkpoint may not have.
    """
    if include_buffers:
        with torch.device(device):
            yield
        return
    target, thread, register = torch.device(device), threading.get_ident(), nn.Module.register_parameter

    def register_there(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or threading.get_ident() != thread or param.device == target:
            return  # a tied parameter is there already, and stays the same object
        moved = type(param)(param.detach().to(target), requires_grad=param.requires_grad)
        moved.__dict__.update(param.__dict__)
        module._parameters[name] = moved  # noqa: SLF001 - registering it would check it again

    nn.Module.register_parameter = register_there  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
