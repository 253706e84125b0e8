"""Every kind of device as one row: how to find it, how its ranks talk, and where its functions are.

Nothing else in accel asks "is this a GPU or an XPU": it looks the row up by `device.type`. torch gives all kinds the
same function names (`torch.cuda.synchronize`, `torch.xpu.synchronize`), so a row is data; what a build of torch does
not have is answered by `call` with a default. Rows without hardware in our tests claim no more than what they say.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from accel_state.availability import is_installed
from accel_state.callsite import warn_user
from accel_state.enums import DistributedType
from accel_state.errors import DeviceError


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One kind of device.

    Args:
        name: torch's word for it, `torch.device(name)`.
        backend: what its ranks talk over in `torch.distributed`; None where they cannot.
        distributed_type: what a job on several of them is called.
        plugin: the package that brings the kind into torch; None when torch itself has it.
        module: dotted name of the module with its functions; `torch.<name>` by default.
    """

    name: str
    backend: str | None
    distributed_type: DistributedType
    plugin: str | None = None
    module: str | None = None

    def functions(self) -> ModuleType | None:
        """The module with this kind's functions, or None where it is not installed."""
        if self.plugin is not None and not _brings_kind(self.plugin):
            return None
        module = importlib.import_module(self.module) if self.module else getattr(torch, self.name, None)
        return module if isinstance(module, ModuleType) else None

    def call(self, function: str, *args: Any, default: Any = None) -> Any:
        """`torch.<kind>.<function>(*args)`, or `default` where this kind has no such function."""
        module = self.functions()
        found = getattr(module, function, None)
        return default if found is None else found(*args)

    def is_available(self) -> bool:
        """Whether a device of this kind can be used now."""
        return bool(self.call("is_available", default=self.plugin is not None and self.functions() is not None))

    def device_count(self) -> int:
        """How many there are; 1 for kinds that do not count."""
        return int(self.call("device_count", default=1))

    def is_live(self) -> bool:
        """Whether this process already uses the kind, so that it has random state worth keeping."""
        return self.is_available() and bool(self.call("is_initialized", default=True))

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        self.call("synchronize")

    def empty_cache(self) -> None:
        """Give cached memory back to the device."""
        self.call("empty_cache")

    def set_device(self, device: torch.device) -> None:
        """Make `device` the current one of this process."""
        self.call("set_device", device)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices of this kind."""
        self.call("manual_seed_all" if hasattr(self.functions(), "manual_seed_all") else "manual_seed", seed)

    def rng_state(self) -> torch.Tensor:
        """The state of the current device's generator (uint8, on the CPU)."""
        state = self.call("get_rng_state")
        return state if isinstance(state, torch.Tensor) else torch.tensor(state)

    def set_rng_state(self, state: torch.Tensor) -> None:
        """The opposite of `rng_state`."""
        self.call("set_rng_state", state if state.dtype == torch.uint8 else state.item())

    def rng_states(self) -> list[torch.Tensor]:
        """The generators' states, one per device (uint8, on the CPU)."""
        return _as_list(self.call("get_rng_state_all", default=None) or self.call("get_rng_state", default=[]))

    def set_rng_states(self, states: list[torch.Tensor]) -> None:
        """The opposite of `rng_states`."""
        if hasattr(self.functions(), "set_rng_state_all"):
            self.call("set_rng_state_all", states)
        elif states:
            self.call("set_rng_state", states[0])


@functools.cache
def _brings_kind(plugin: str) -> bool:
    """Whether a plugin of torch is there and can be imported; one that is there and broken is named in a warning."""
    if not is_installed(plugin.partition(".")[0]):
        return False
    try:
        importlib.import_module(plugin)
    except Exception as error:  # noqa: BLE001  (a broken plugin may raise anything, and others can still be used)
        warn_user(f"{plugin} is installed but cannot be imported: {type(error).__name__}: {error}")
        return False
    return True


def _as_list(states: Any) -> list[torch.Tensor]:
    return [states] if isinstance(states, torch.Tensor) else list(states)


# Order of preference when several kinds are there; the CPU is what is left.
KINDS: tuple[DeviceKind, ...] = (
    DeviceKind(name="xla", backend="xla", distributed_type=DistributedType.XLA, plugin="torch_xla", module="torch_xla"),
    DeviceKind(name="cuda", backend="nccl", distributed_type=DistributedType.MULTI_GPU),
    DeviceKind(name="xpu", backend="xccl", distributed_type=DistributedType.MULTI_XPU),
    DeviceKind(name="npu", backend="hccl", distributed_type=DistributedType.MULTI_NPU, plugin="torch_npu"),
    DeviceKind(name="mlu", backend="cncl", distributed_type=DistributedType.MULTI_MLU, plugin="torch_mlu"),
    DeviceKind(name="musa", backend="mccl", distributed_type=DistributedType.MULTI_MUSA, plugin="torch_musa"),
    DeviceKind(name="sdaa", backend="tccl", distributed_type=DistributedType.MULTI_SDAA, plugin="torch_sdaa"),
    DeviceKind(
        name="hpu", backend="hccl", distributed_type=DistributedType.MULTI_HPU, plugin="habana_frameworks.torch"
    ),
    DeviceKind(name="neuron", backend="neuron", distributed_type=DistributedType.MULTI_NEURON, plugin="torch_neuronx"),
    DeviceKind(name="mps", backend=None, distributed_type=DistributedType.NO),
    DeviceKind(name="cpu", backend="gloo", distributed_type=DistributedType.MULTI_CPU),
)
BY_NAME = {kind.name: kind for kind in KINDS}
CPU = BY_NAME["cpu"]


def device_kind(device: torch.device | str) -> DeviceKind:
    """The row of a device.

    Raises:
        DeviceError: a type that no row describes (as `meta`).
    """
    name = str(device).partition(":")[0]  # torch.device itself does not know kinds whose plugin is not there
    kind = BY_NAME.get(name)
    if kind is None:
        raise DeviceError(f"device type {name!r} is not one that training runs on: known are {', '.join(BY_NAME)}")
    return kind


def detect_kind(cpu: bool = False) -> DeviceKind:
    """The kind that this process should run on: the first one that is there.

    Args:
        cpu: ignore every accelerator.
    """
    return CPU if cpu else next(kind for kind in KINDS if kind.is_available())


def live_accelerators() -> Iterator[DeviceKind]:
    """The kinds besides the CPU that this process already uses."""
    return (kind for kind in KINDS if kind is not CPU and kind.is_live())


def choose_device(kind: DeviceKind, local_rank: int) -> torch.device:
    """The device of a rank: one each, by local rank; kinds without numbers (cpu, mps) share theirs.

    Raises:
        DeviceError: fewer devices than ranks on this machine.
    """
    if kind.name in ("cpu", "mps"):
        return torch.device(kind.name)
    count = kind.device_count()
    if local_rank >= count:
        raise DeviceError(
            f"local rank {local_rank} has no {kind.name} device: there are {count} (numbers 0 to {count - 1}). "
            f"Start at most {count} processes per machine, or pass cpu=True"
        )
    return torch.device(kind.name, local_rank)


def find_device(named: str) -> tuple[DeviceKind, torch.device]:
    """The device that a user named, and its row.

    Raises:
        DeviceError: there is no such device here.
    """
    kind = device_kind(named)
    if not kind.is_available():
        raise DeviceError(f"device {named!r} was asked for, but no {kind.name} device can be used here")
    try:
        device = torch.device(named)
    except RuntimeError as error:
        raise DeviceError(
            f"device {named!r} was asked for, which is not a device: write it as {kind.name}:0"
        ) from error
    count = kind.device_count()
    if kind is not CPU and device.index is not None and device.index >= count:
        raise DeviceError(
            f"device {named!r} was asked for, but there are {count} {kind.name} devices (0 to {count - 1})"
        )
    return kind, device
