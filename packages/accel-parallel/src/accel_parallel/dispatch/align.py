"""The hook that brings a module's weights and inputs to where it computes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel_state import find_device, send_to_device

from .hooks import ModelHook
from .module_tensors import TiedMap, named_module_tensors, owner_of, set_module_tensor_to_device
from .numbers import any_to_device
from .placeholders import OffloadedWeight, stand_in
from .prefetch import Prefetcher

_log = logging.getLogger(__name__)

Device = int | str | torch.device


@dataclass(frozen=True)
class _Slot:
    """A place of an offloaded tensor: `held[name]`, between forwards the stand-in; and where the tensor was before."""

    held: MutableMapping[str, Tensor]
    name: str
    empty: OffloadedWeight
    before: torch.device


class AlignDevicesHook(ModelHook):
    """Before a module's forward its inputs, and its weights if they are offloaded, come to where it computes.

    Args:
        execution_device: where; None leaves the inputs where they are, and offloaded weights compute where they were.
        offload: whether the weights lie elsewhere, and are brought for each forward and let go after it. They get no
            gradients.
        io_same_device: bring the output back to where the input was.
        weights_map: where offloaded weights are, by their names in the module; None keeps them in the CPU's memory.
        offload_buffers: whether buffers are offloaded too; else they stay where the module computes.
        place_submodules: take care of the tensors of submodules too.
        skip_keys: names of keyword arguments, or keys inside, that are left where they are.
        tied_params_map: what was put where already, so that tied weights stay one; see `set_module_tensor_to_device`.

    Cost: per forward a copy of the weights that do not lie on the device; none for memory-mapped files on the CPU. The
    next module's weights are copied by another thread meanwhile, see `Prefetcher`.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedMap | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self.only: Collection[str] | None = None  # names of tensors, where not all of the module are meant
        self.prefetcher: Prefetcher | None = None
        self.stand_ins: MutableMapping[int, OffloadedWeight] | None = None  # of tied tensors, by id of the tensor
        self._slots: list[_Slot] = []
        self._kept: list[tuple[Tensor, Tensor] | None] = []
        self._depth = 0
        self._has_warned = False

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    # ---- attached and taken away

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Puts the weights on the device; offloaded ones are replaced by stand-ins."""
        tensors = [
            (name, tensor)
            for name, tensor in _all_tensors(module, self.place_submodules)
            if self.only is None or name in self.only
        ]
        if self.offload:
            self._offload(module, tensors)
        elif self.execution_device is not None:
            for name, _ in tensors:
                set_module_tensor_to_device(module, name, self.execution_device, tied_params_map=self.tied_params_map)
        return module

    def _offload(self, module: nn.Module, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self.original_devices = {name: tensor.device for name, tensor in tensors}
        if self.execution_device is None:
            self.execution_device = next(
                (device for device in self.original_devices.values() if device.type != "meta"), torch.device("cpu")
            )
        stored = [(n, t) for n, t in tensors if self.offload_buffers or isinstance(t, nn.Parameter)]
        if self.weights_map is None:
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in stored}
        execution_device = any_to_device(self.execution_device)
        self._slots = []
        for name, tensor in tensors:
            is_stored = self.offload_buffers or isinstance(tensor, nn.Parameter)
            if not is_stored or name not in self.weights_map:
                value = self.weights_map.get(name) if tensor.is_meta else None
                set_module_tensor_to_device(
                    module, name, execution_device, value=value, tied_params_map=self.tied_params_map
                )
                continue
            owner, own_name = owner_of(module, name)
            is_parameter = own_name in owner._parameters  # noqa: SLF001 - the slot itself is what changes
            held: Any = owner._parameters if is_parameter else owner._buffers  # noqa: SLF001
            empty = self._stand_in(module, name, tensor, execution_device)
            held[own_name] = empty
            self._slots.append(_Slot(held, own_name, empty, tensor.device))
        self._kept = [None] * len(self._slots)

    def _stand_in(self, module: nn.Module, name: str, tensor: Tensor, device: torch.device) -> OffloadedWeight:
        """One for each tied tensor, so that the tie is kept."""
        if isinstance(tensor, OffloadedWeight):
            return tensor
        known = None if self.stand_ins is None else self.stand_ins.get(id(tensor))
        if known is None:
            assert self.weights_map is not None
            known = stand_in(tensor, self.weights_map, name, device, f"{type(module).__name__}.{name}")
            if self.stand_ins is not None:
                self.stand_ins[id(tensor)] = known
        return known

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Offloaded weights come back to where they were; to the CPU if they never were anywhere."""
        for slot in self._slots:
            empty = slot.empty
            if empty.restored is None:
                value = empty.load_now(torch.device("cpu") if slot.before.type == "meta" else slot.before)
                is_parameter = isinstance(empty, nn.Parameter)
                empty.restored = nn.Parameter(value, empty.requires_grad) if is_parameter else value
            slot.held[slot.name] = empty.restored
        self._slots, self._kept = [], []
        return module

    # ---- around the forward

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Brings weights and inputs."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            self.load(module)
        if self.execution_device is None:
            return args, kwargs
        return _moved((args, kwargs), any_to_device(self.execution_device), self.skip_keys)  # type: ignore[no-any-return]

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Lets the weights go, and brings the output to where the input was."""
        if self.offload:
            self.release(module)
        if not self.io_same_device:
            return output
        if self.prefetcher is not None:
            self.prefetcher.finish()
        return output if self.input_device is None else _moved(output, self.input_device, self.skip_keys)

    def forward_failed(self, module: nn.Module) -> None:
        """Lets the weights go."""
        if self.offload:
            self.release(module)

    def load(self, module: nn.Module) -> None:
        """Put the weights in their places. Calls may be nested; the last `release` counts."""
        self._depth += 1
        if self._depth > 1 or not self._slots:
            return
        try:
            brought = _bring(self) if self.prefetcher is None else self.prefetcher.take(self)
        except BaseException:
            self._depth -= 1
            raise
        for index, (slot, weight) in enumerate(zip(self._slots, brought, strict=True)):
            slot.held[slot.name] = self._wrapped(index, slot.empty, weight)
        if module.training and torch.is_grad_enabled() and not self._has_warned:
            self._warn_of_training(module)

    def _warn_of_training(self, module: nn.Module) -> None:
        if not any(slot.empty.requires_grad for slot in self._slots):
            return
        self._has_warned = True
        if self.prefetcher is None or not self.prefetcher.has_warned:
            _log.warning(
                "%s runs in training mode with offloaded weights that require gradients, which they do not get. Call "
                "eval(), or requires_grad_(False) on what is not trained, and keep the rest on a device.",
                type(module).__name__,
            )
        if self.prefetcher is not None:
            self.prefetcher.has_warned = True

    def _wrapped(self, index: int, empty: OffloadedWeight, weight: Tensor) -> Tensor:
        """A parameter where one was; the same object each time if the weight is the same (mapped, or in memory)."""
        if not isinstance(empty, nn.Parameter):
            return weight
        kept = self._kept[index]
        if kept is not None and kept[0].data_ptr() == weight.data_ptr():
            return kept[1]
        made = nn.Parameter(weight, requires_grad=False)
        if weight.device.type == "cpu":
            self._kept[index] = weight, made
        return made

    def release(self, module: nn.Module) -> None:
        """Put the stand-ins back."""
        del module
        self._depth -= 1
        if not self._depth:
            for slot in self._slots:
                slot.held[slot.name] = slot.empty

    # ---- what is fetched ahead

    def weights(self) -> list[Tensor]:
        """Where they lie."""
        return [slot.empty.stored() for slot in self._slots]

    def device(self) -> torch.device:
        """Where they are wanted."""
        assert self.execution_device is not None
        return any_to_device(self.execution_device)

    def is_slow(self) -> bool:
        """Whether weights come from files, or go to an accelerator."""
        if self.device().type != "cpu":
            return True
        return any(slot.empty.is_on_disk() for slot in self._slots)


def _bring(hook: AlignDevicesHook) -> list[Tensor]:
    device = hook.device()
    return [weight.to(device) for weight in hook.weights()]


def _all_tensors(module: nn.Module, recurse: bool) -> list[tuple[str, Tensor]]:
    """Parameters, then buffers; a tied one under each of its names."""
    parts = module.named_modules(remove_duplicate=False) if recurse else [("", module)]
    return [
        (f"{prefix}.{name}" if prefix else name, tensor)
        for prefix, part in parts
        for name, tensor in named_module_tensors(part)
    ]


def _moved(data: Any, device: torch.device, skip_keys: str | list[str] | None) -> Any:
    """As `send_to_device`; quicker where everything is there already."""
    return data if _is_there(data, device) else send_to_device(data, device, skip_keys=skip_keys)


def _is_there(data: Any, device: torch.device) -> bool:
    if isinstance(data, Tensor):
        return data.device == device
    if data is None or isinstance(data, (bool, int, float, str)):
        return True
    if type(data) in (tuple, list):
        return all(_is_there(value, device) for value in data)
    return type(data) is dict and all(_is_there(value, device) for value in data.values())
