"""What the peer offers as functions that look at the current process and the current Accelerator."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accel_state import AcceleratorState, DistributedType, PartialState

from .handlers import AutocastKwargs
from .policy import PrecisionPolicy
from .scaler import GradScaler

_SHARDED = (DistributedType.FSDP, DistributedType.MEGATRON_LM)


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> GradScaler:
    """A loss scaler for this process's device.

    Args:
        distributed_type: under FSDP and Megatron-LM ranks hold different gradients, and skip updates together.
        kwargs: of `GradScaler`, as `init_scale`.
    """
    return GradScaler(PartialState().device.type, sharded=distributed_type in _SHARDED, **kwargs)


def get_fsdp2_grad_scaler(**kwargs: Any) -> GradScaler:
    """A loss scaler for models under `fully_shard`; every `GradScaler` is one.

    Args:
        kwargs: of `GradScaler`.
    """
    return get_grad_scaler(**kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """A block that computes in the current Accelerator's precision.

    Args:
        native_amp: False gives a block that does nothing.
        autocast_kwargs: see `PrecisionPolicy.autocast`.

    Raises:
        NoAcceleratorError: there is no live Accelerator.
    """
    state = AcceleratorState()
    if not native_amp:
        return nullcontext()
    name = "bf16" if state.mixed_precision == "fp8" else state.mixed_precision  # what surrounds 8-bit layers
    return PrecisionPolicy.from_name(name).autocast(state.device.type, autocast_kwargs)
