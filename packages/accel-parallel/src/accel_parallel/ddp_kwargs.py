"""Options of DistributedDataParallel, with the peer's names."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accel_state import KwargsHandler

from . import comm_hooks


class DDPCommunicationHookType(enum.StrEnum):
    """How gradients are compressed on the wire."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """What DistributedDataParallel is told.

    Args:
        dim, broadcast_buffers, bucket_cap_mb, find_unused_parameters, check_reduction, gradient_as_bucket_view,
            static_graph: torch's, with torch's defaults.
        comm_hook: compression of the gradients on the wire.
        comm_wrapper: fp16 or bf16 around `comm_hook`.
        comm_state_option: keyword arguments of PowerSGDState, for the two PowerSGD hooks.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False

    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = DDPCommunicationHookType(self.comm_hook)
        self.comm_wrapper = DDPCommunicationHookType(self.comm_wrapper)
        if self.comm_wrapper not in (DDPCommunicationHookType.NO, *_WIRE_DTYPES):
            raise ValueError(f"comm_wrapper={self.comm_wrapper.value!r} is not allowed: use 'no', 'fp16' or 'bf16'.")

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """The fields that are arguments of DistributedDataParallel."""
        return {key: value for key, value in super().to_dict().items() if key not in ignore_keys}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Make `model` compress its gradients as the fields say; with 'no' it is left alone."""
        kind = DDPCommunicationHookType(self.comm_hook)
        wrapper = DDPCommunicationHookType(self.comm_wrapper)
        if kind is DDPCommunicationHookType.NO and wrapper is DDPCommunicationHookType.NO:
            return
        state: Any = model.process_group
        inner: Any = None
        if kind in (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD):
            state = powerSGD_hook.PowerSGDState(process_group=model.process_group, **self.comm_state_option)
            batched = kind is DDPCommunicationHookType.BATCHED_POWER_SGD
            inner = comm_hooks.batched_power_sgd if batched else powerSGD_hook.powerSGD_hook
        elif kind in _WIRE_DTYPES:
            inner = comm_hooks.average_as(_WIRE_DTYPES[kind])
        if wrapper in _WIRE_DTYPES:
            inner = (
                comm_hooks.average_as(_WIRE_DTYPES[wrapper])
                if inner is None
                else comm_hooks.cast_around(inner, _WIRE_DTYPES[wrapper])
            )
        model.register_comm_hook(state=state, hook=inner)


_WIRE_DTYPES = {DDPCommunicationHookType.FP16: torch.float16, DDPCommunicationHookType.BF16: torch.bfloat16}
