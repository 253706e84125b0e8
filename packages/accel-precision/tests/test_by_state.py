import pytest
import torch

from accel_precision import (
    AutocastKwargs,
    GradScaler,
    get_fsdp2_grad_scaler,
    get_grad_scaler,
    get_mixed_precision_context_manager,
)
from accel_state import AcceleratorState, DistributedType, PartialState
from accel_state.errors import NoAcceleratorError


@pytest.fixture
def state():
    """A current Accelerator's state, of a precision."""
    made = []

    def make(name: str) -> None:
        made.append(AcceleratorState(name, cpu=True, _from_accelerator=True))

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)


def dtype_of_products() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_scalers_are_made_for_the_device_and_know_whether_ranks_differ():
    PartialState(cpu=True)
    try:
        scaler = get_grad_scaler(init_scale=4.0)
        assert isinstance(scaler, GradScaler)
        assert (scaler.is_enabled(), scaler.get_scale(), scaler._device) == (True, 4.0, "cpu")
        kinds = (None, DistributedType.FSDP, DistributedType.MULTI_CPU)
        assert [get_grad_scaler(kind)._sharded for kind in kinds] == [False, True, False]
        assert get_fsdp2_grad_scaler(growth_interval=3).get_growth_interval() == 3
    finally:
        PartialState._reset_state()


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
def test_the_block_computes_in_the_current_accelerators_precision(state, name):
    state(name)
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    with get_mixed_precision_context_manager(native_amp=True):
        assert dtype_of_products() is dtype
        with get_mixed_precision_context_manager(native_amp=True, autocast_kwargs=AutocastKwargs(enabled=False)):
            assert dtype_of_products() is torch.float32
        assert dtype_of_products() is dtype
    with get_mixed_precision_context_manager():
        assert dtype_of_products() is torch.float32


def test_without_an_accelerator_there_is_no_precision():
    with pytest.raises(NoAcceleratorError):
        get_mixed_precision_context_manager(native_amp=True)
