"""The tensors of a module by name, and one of them put elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accel_state.devices import device_kind
from accel_state.errors import DeviceMapError

from .numbers import Dtype, any_to_device, as_dtype

TiedMap = MutableMapping[int, MutableMapping[Any, Tensor]]
"""Address of a tied tensor's numbers -> device -> the one tensor that all its users share there."""


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers.

    Args:
        include_buffers: False gives parameters alone.
        recurse: those of submodules too, by dotted names; a shared tensor once.
        remove_non_persistent: leave out buffers that no state dict has.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else ()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in left_out:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of buffers that no state dict has.

    Args:
        recurse: those of submodules too.
        fqns: by dotted names; else the last part alone.
    """
    if not recurse:
        return set(module._non_persistent_buffers_set)  # noqa: SLF001 - torch has no public way
    return {
        f"{prefix}.{name}" if fqns and prefix else name
        for prefix, part in module.named_modules()
        for name in part._non_persistent_buffers_set  # noqa: SLF001
    }


def owner_of(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """The submodule that holds a tensor directly, and the tensor's name there.

    Raises:
        DeviceMapError: there is no such tensor.
    """
    path, _, name = tensor_name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError as error:
        raise DeviceMapError(f"{type(module).__name__} has no submodule {path!r}, so no {tensor_name!r}") from error
    if name not in owner._parameters and name not in owner._buffers:  # noqa: SLF001
        held = ", ".join([*owner._parameters, *owner._buffers]) or "none"  # noqa: SLF001
        raise DeviceMapError(
            f"{type(owner).__name__} does not have a parameter or a buffer named {name}: it has {held}"
        )
    return owner, name


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: Tensor | None = None,
    dtype: Dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: TiedMap | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or buffer on a device, with its own value or another one.

    A parameter stays a parameter, with its `requires_grad`; where nothing changes it stays the same object.

    Args:
        tensor_name: dotted.
        device: where to; "meta" drops the numbers.
        value: the new numbers, of the same shape; needed where the tensor lies on the meta device.
        dtype: of the result; None takes that of the tensor for a `value`, and else leaves it.
        fp16_statistics: `SCB` of an 8-bit weight of bitsandbytes, which is set on the new tensor.
        tied_params_map: what was put where before, so that tied tensors stay one: address of the numbers -> device ->
            tensor. Filled by this function for the addresses that it has.
        non_blocking: do not wait for copies from pinned memory.
        clear_cache: give the device's cached memory back if a tensor left it.

    Raises:
        DeviceMapError: no such tensor, a value of another shape, or none for a tensor without numbers.
    """
    owner, name = owner_of(module, tensor_name)
    held = owner._parameters if name in owner._parameters else owner._buffers  # noqa: SLF001
    old = held[name]
    target = any_to_device(device)
    if old is None:
        if value is not None:
            raise DeviceMapError(f"{tensor_name} of {type(module).__name__} is None: it takes no value")
        return
    _require_value(tensor_name, old, value, target)
    source = old if value is None else value
    shared = _shared(tied_params_map, source, old)
    if shared is not None and target in shared:
        held[name] = shared[target]  # type: ignore[assignment] # parameters where parameters are
        return
    wanted = old.dtype if dtype is None else as_dtype(dtype)
    if dtype is not None and not source.dtype.is_floating_point:
        wanted = source.dtype  # counters, masks and quantised weights keep their kind
    assert isinstance(wanted, torch.dtype)
    if value is None and old.device == target and wanted == old.dtype:
        new = old
    else:
        with torch.no_grad():
            new = _as_held(source.detach().to(target, wanted, non_blocking=non_blocking), old)
    if fp16_statistics is not None:
        new.SCB = fp16_statistics.to(target)  # type: ignore[attr-defined] # bitsandbytes' name
    if shared is not None and target.type != "meta":
        shared[target] = new
    held[name] = new  # type: ignore[assignment]
    if clear_cache and new is not old and old.device != target and old.device.type not in ("cpu", "meta"):
        device_kind(old.device).empty_cache()


def _require_value(tensor_name: str, old: Tensor, value: Tensor | None, target: torch.device) -> None:
    if value is None and old.is_meta and target.type != "meta" and not hasattr(old, "load_now"):
        raise DeviceMapError(f"{tensor_name} is on the meta device, we need a `value` to put in on {target}.")
    if value is not None and value.shape != old.shape:
        raise DeviceMapError(
            f'Trying to set a tensor of shape {value.shape} in "{tensor_name}" (which has shape {old.shape}): load '
            "weights of the same model, or build the model by the weights' configuration"
        )


def _shared(tied: TiedMap | None, source: Tensor, old: Tensor) -> MutableMapping[Any, Tensor] | None:
    """Where a tied tensor lies already, if it is one."""
    for tensor in (source, old) if tied else ():
        if not tensor.is_meta and (found := tied.get(tensor.data_ptr())) is not None:  # type: ignore[union-attr]
            return found
    return None


def _as_held(tensor: Tensor, old: Tensor) -> Tensor:
    """A parameter where a parameter was, of the same class and with the same attributes."""
    if not isinstance(old, nn.Parameter):
        return tensor
    trainable = old.requires_grad and tensor.is_floating_point()
    made: Tensor = type(old)(tensor, requires_grad=trainable)
    return made


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a hook on this module loads its weights for each forward."""
    from .align import AlignDevicesHook
    from .hooks import hooks_of

    return any(isinstance(hook, AlignDevicesHook) and hook.offload for hook in hooks_of(module))


@contextmanager
def align_module_device(module: nn.Module, execution_device: int | str | torch.device | None = None) -> Iterator[None]:
    """A block in which a module's own tensors are on one device, loaded if they were offloaded.

    Offloaded tensors are let go after it, changes to them included; others are moved back.

    Args:
        execution_device: where; None takes that of the module's hook, and leaves a module without one alone.
    """
    from .align import AlignDevicesHook
    from .hooks import hooks_of

    offloading = [hook for hook in hooks_of(module) if isinstance(hook, AlignDevicesHook) and hook.offload]
    if offloading:
        hook = offloading[0]
        before, hook.execution_device = hook.execution_device, execution_device or hook.execution_device
        try:
            hook.load(module)
            yield
        finally:
            hook.release(module)
            hook.execution_device = before
    elif execution_device is not None:
        yield from _aligned(module, any_to_device(execution_device))
    else:
        yield


def _aligned(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Copies of a module's own tensors take their places for a block; what was written to them is kept."""
    moved: list[tuple[Any, str, Tensor]] = []
    for held in (module._parameters, module._buffers):  # noqa: SLF001 - the places themselves are what changes
        for name, tensor in held.items():
            if tensor is not None and tensor.device != device:
                _require_value(name, tensor, None, device)
                moved.append((held, name, tensor))
    for held, name, tensor in moved:
        held[name] = _as_held(tensor.detach().to(device), tensor)
    try:
        yield
    finally:
        for held, name, tensor in moved:
            if device.type != "meta":
                with torch.no_grad():
                    tensor.copy_(held[name])
            held[name] = tensor
