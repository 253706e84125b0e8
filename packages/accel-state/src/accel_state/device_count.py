"""How many accelerators are here, without torch and without touching one.

A CUDA context takes a second and cannot be inherited by a fork; the launcher only needs a number.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from accel_state.errors import DeviceError

Environment = Mapping[str, str]


class CudaHardware(NamedTuple):
    """What the driver reports: one UUID per GPU, in the driver's order, and whether one is split into instances."""

    uuids: Sequence[str]
    is_mig: Sequence[bool]


def count_devices(kind: str = "cuda", environ: Environment | None = None) -> int:
    """How many devices of a kind a new process would see.

    Args:
        kind: `cuda` (NVIDIA and ROCm, as torch names both) or `mps`.
        environ: the variables that hide devices (`CUDA_VISIBLE_DEVICES`, …); the process's own by default.

    Raises:
        DeviceError: a kind that cannot be counted.
    """
    counter = _COUNTERS.get(kind)
    if counter is None:
        raise DeviceError(f"devices of kind {kind!r} cannot be counted: known are {', '.join(sorted(_COUNTERS))}")
    return counter(os.environ if environ is None else environ)


# ---------------------------------------------------------------- cuda


def _count_cuda(environ: Environment) -> int:
    num_rocm = _rocm_device_count(Path("/sys/class/kfd/kfd/topology/nodes"))
    if not num_rocm:
        return _visible_count(environ.get("CUDA_VISIBLE_DEVICES"), _nvidia_hardware())
    hip = environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
    for selection in (environ.get("ROCR_VISIBLE_DEVICES"), hip):  # HIP numbers what the runtime below it leaves
        num_rocm = _visible_count(selection, CudaHardware([""] * num_rocm, [False] * num_rocm))
    return num_rocm


def _visible_count(selection: str | None, hardware: CudaHardware) -> int:
    """What CUDA makes of `CUDA_VISIBLE_DEVICES`: entries count up to the first invalid one, a repetition voids all.

    An entry is an index, a (prefix of a) GPU UUID, or a MIG instance. A process sees one MIG instance at most, so a
    list that starts with one counts 1, and so does a machine whose GPUs are split.
    """
    num_devices = len(hardware.uuids)
    if selection is None:
        return 1 if any(hardware.is_mig) else num_devices
    chosen: list[int] = []
    for entry in (part.strip() for part in selection.split(",")):
        if entry.startswith("MIG-"):
            return len(chosen) or min(1, num_devices)
        index = _device_index(entry, hardware)
        if index is None:
            break
        if index in chosen:
            return 0
        chosen.append(index)
    return len(chosen)


def _device_index(entry: str, hardware: CudaHardware) -> int | None:
    if entry.startswith("GPU-"):
        matches = [index for index, uuid in enumerate(hardware.uuids) if uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    if not entry.isascii() or not entry.isdigit():
        return None
    return int(entry) if int(entry) < len(hardware.uuids) else None


def _nvidia_hardware() -> CudaHardware:
    """Asks the driver's management library (NVML), which makes no CUDA context; nothing found is no GPU."""
    if sys.platform != "win32" and not any(
        Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")
    ):  # saves loading a library on the machines that have none
        return CudaHardware([], [])
    import ctypes

    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return CudaHardware([], [])
    if nvml.nvmlInit_v2() != 0:
        return CudaHardware([], [])
    try:
        return _ask_nvml(nvml)
    finally:
        nvml.nvmlShutdown()


def _ask_nvml(nvml: object) -> CudaHardware:
    import ctypes

    assert isinstance(nvml, ctypes.CDLL)
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return CudaHardware([], [])
    uuids, is_mig = [], []
    for index in range(count.value):
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
            continue  # a GPU that this process may not open is one that CUDA will not show either
        nvml.nvmlDeviceGetUUID(handle, uuid, len(uuid))
        has_mode = nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(current), ctypes.byref(pending)) == 0
        uuids.append(uuid.value.decode())
        is_mig.append(has_mode and current.value == 1)
    return CudaHardware(uuids, is_mig)


def _rocm_device_count(nodes: Path) -> int:
    """GPUs among the nodes of the kernel's compute topology: CPUs are listed there too, with no SIMD units."""
    if not nodes.is_dir():
        return 0
    count = 0
    for node in nodes.iterdir():
        try:
            lines = (node / "properties").read_text().splitlines()
        except OSError:
            continue  # a node that a container may not read is one that it may not use
        count += any(line.startswith("simd_count ") and line != "simd_count 0" for line in lines)
    return count


# ---------------------------------------------------------------- mps


def _count_mps(_environ: Environment) -> int:
    return int(sys.platform == "darwin" and os.uname().machine == "arm64")


_COUNTERS: dict[str, Callable[[Environment], int]] = {"cuda": _count_cuda, "mps": _count_mps}
