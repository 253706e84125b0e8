"""What this machine and its GPUs are, asked of the driver rather than of torch, so that no device is initialised."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from accel_state.callsite import warn_user
from accel_state.devices import detect_kind, device_kind
from accel_state.errors import DeviceError
from accel_state.topology import Topology

_FIXED_DRIVER = (550, 40, 7)  # from here on consumer GPUs say themselves that they have no peer-to-peer


@dataclass
class CPUInformation:
    """This process's place among all, as `Topology` has it, with the peer's name and fields."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """This process's place by the launcher's variables; makes no process group.

    Raises:
        TopologyError: the variables contradict each other.
    """
    here = Topology.from_env()
    return CPUInformation(here.rank, here.world_size, here.local_rank, here.local_world_size)


def get_current_device_type() -> tuple[str, str]:
    """The best kind of device here, and what a job on several of them is called: `("cuda", "MULTI_GPU")`."""
    kind = detect_kind()
    return kind.name, kind.distributed_type.value


def get_gpu_info() -> tuple[list[str], int]:
    """Names of the NVIDIA GPUs of this machine, and how many there are.

    Raises:
        DeviceError: `nvidia-smi` is not there or fails.
    """
    names = _ask_driver("name")
    return names, len(names)


def check_cuda_p2p_ib_support() -> bool:
    """Whether GPUs may talk to each other directly; False for RTX 40xx with a driver that claims it wrongly."""
    try:
        names, versions = _ask_driver("name"), _ask_driver("driver_version")
    except DeviceError:
        return True  # no NVIDIA GPU, so none of that kind
    driver = tuple(int(part) for part in re.findall(r"\d+", versions[0])) if versions else _FIXED_DRIVER
    return driver >= _FIXED_DRIVER or not any(re.search(r"RTX 40\d\d", name) for name in names)


def _ask_driver(field: str) -> list[str]:
    """One line per GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise DeviceError("nvidia-smi is not on the PATH, so that the GPUs' names cannot be read: is there a driver?")
    command = [program, f"--query-gpu={field}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise DeviceError(f"nvidia-smi failed with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


@cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Keep this process on the cores that are next to its GPU; without an NVIDIA GPU a warning says so.

    Args:
        local_process_index: which GPU.
        verbose: print the cores; by the setting `debug` by default.

    Raises:
        DeviceError: no GPU of that number.
    """
    from accel_state.settings import setting

    kind = detect_kind()
    if kind.name != "cuda" or not hasattr(os, "sched_setaffinity"):
        warn_user("set_numa_affinity has no effect here: it knows NVIDIA GPUs on Linux only")
        return
    place = _pci_folder(local_process_index) / "local_cpulist"
    if not place.exists():
        warn_user(f"set_numa_affinity has no effect here: there is no {place}")
        return
    cores = _cores(place.read_text())
    os.sched_setaffinity(0, cores)
    if setting("debug") if verbose is None else verbose:
        print(f"process {local_process_index} runs on cores {sorted(cores)}")


def _pci_folder(index: int) -> Path:
    import torch

    count = device_kind("cuda").device_count()
    if not 0 <= index < count:
        raise DeviceError(f"there is no GPU {index}: there are {count} (numbers 0 to {count - 1})")
    about: Any = torch.cuda.get_device_properties(index)
    return Path(f"/sys/bus/pci/devices/{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0")


def _cores(text: str) -> set[int]:
    """`0-3,8` as numbers."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
