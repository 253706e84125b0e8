"""Whether a kind of device, or a kind of number on it, can be used here; cached."""

from __future__ import annotations

from functools import cache

import torch

from accel_state.availability import is_msamp_available, is_torchao_available, is_transformer_engine_available
from accel_state.devices import BY_NAME, detect_kind
from accel_state.environment import patch_environment


@cache
def is_cuda_available() -> bool:
    """Whether CUDA (or ROCm) can be used; asked of the driver's management library, so that forking stays possible."""
    with patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


@cache
def is_rocm_available() -> bool:
    """Whether the GPUs are AMD's."""
    return torch.version.hip is not None and is_cuda_available()


@cache
def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether Apple's GPU can be used, and torch is of `min_version` at least."""
    from accel_state.versions import is_torch_version

    return is_torch_version(">=", min_version) and BY_NAME["mps"].is_available()


@cache
def _is_kind_available(name: str, check_device: bool = False) -> bool:
    """Whether a kind of device is there; with `check_device` also whether it can hold a tensor."""
    if not BY_NAME[name].is_available():
        return False
    if not check_device:
        return True
    try:
        torch.zeros(1, device=name)
    except RuntimeError:
        return False
    return True


def is_xpu_available(check_device: bool = False) -> bool:
    """Whether an Intel GPU can be used; with `check_device` it is tried."""
    return _is_kind_available("xpu", check_device)


def is_npu_available(check_device: bool = False) -> bool:
    """Whether an Ascend NPU can be used; with `check_device` it is tried."""
    return _is_kind_available("npu", check_device)


def is_mlu_available(check_device: bool = False) -> bool:
    """Whether a Cambricon MLU can be used; with `check_device` it is tried."""
    return _is_kind_available("mlu", check_device)


def is_musa_available(check_device: bool = False) -> bool:
    """Whether a Moore Threads GPU can be used; with `check_device` it is tried."""
    return _is_kind_available("musa", check_device)


def is_sdaa_available(check_device: bool = False) -> bool:
    """Whether a Tecorigin SDAA can be used; with `check_device` it is tried."""
    return _is_kind_available("sdaa", check_device)


def is_neuron_available(check_device: bool = False) -> bool:
    """Whether an AWS Neuron core can be used; with `check_device` it is tried."""
    return _is_kind_available("neuron", check_device)


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Whether an Intel Gaudi can be used; with `init_hccl` its communication library is loaded too."""
    if init_hccl and _is_kind_available("hpu"):
        import importlib

        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return _is_kind_available("hpu")


@cache
def is_habana_gaudi1() -> bool:
    """Whether the Gaudi here is of the first generation, which has no fp16."""
    if not is_hpu_available():
        return False
    import importlib

    return str(importlib.import_module("habana_frameworks.torch.hpu").get_device_name()).upper() == "GAUDI"


@cache
def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla can be used, on a TPU or a GPU where that is asked for.

    Raises:
        ValueError: both are asked for.
    """
    if check_is_tpu and check_is_gpu:
        raise ValueError("check_is_tpu and check_is_gpu exclude each other: ask for one")
    if not BY_NAME["xla"].is_available():
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    import importlib

    hardware = importlib.import_module("torch_xla.runtime").device_type()
    return hardware == "TPU" if check_is_tpu else hardware in ("GPU", "CUDA")


@cache
def is_xccl_available() -> bool:
    """Whether torch was built with Intel's communication library."""
    return torch.distributed.is_available() and torch.distributed.is_xccl_available()


# ---------------------------------------------------------------- numbers


@cache
def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether the best device here computes in bfloat16.

    Args:
        ignore_tpu: answer False on XLA.
    """
    kind = detect_kind()
    if kind.name == "xla":
        return not ignore_tpu
    if kind.name == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return bool(kind.call("is_bf16_supported", default=True))


@cache
def is_fp16_available() -> bool:
    """Whether the best device here computes in float16: all but the first Gaudi do."""
    return not is_habana_gaudi1()


@cache
def is_fp8_available() -> bool:
    """Whether a library for training in 8-bit floats is installed."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


@cache
def is_transformer_engine_mxfp8_available() -> bool:
    """Whether transformer-engine is there and the GPU knows block-scaled 8-bit floats (compute capability 10)."""
    is_here = is_transformer_engine_available() and is_cuda_available()
    return is_here and torch.cuda.get_device_capability() >= (10, 0)


@cache
def check_cuda_fp8_capability() -> bool:
    """Whether the current GPU computes in 8-bit floats (compute capability 8.9); False without a GPU."""
    return is_cuda_available() and torch.cuda.get_device_capability() >= (8, 9)
