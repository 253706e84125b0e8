"""Small functions of the peer's names, and what is asked of the driver."""

from __future__ import annotations

import logging
import os
import platform
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import accel_state
from accel_state import hardware
from accel_state.errors import CollectiveMismatchError, DeviceError


def test_a_shared_dict_is_one_per_thread() -> None:
    class Holder:
        shared = accel_state.ThreadLocalSharedDict()

    Holder().shared["x"] = 1
    assert Holder().shared == {"x": 1}
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(dict(Holder().shared)))
    thread.start()
    thread.join()
    assert seen == [{}]
    holder = Holder()
    holder.shared = {"y": 2}
    assert Holder().shared == {"y": 2}


@pytest.mark.parametrize(
    ("size", "text"),
    [(10, "10 bytes"), (1024, "1.0 KB"), (123456789, "117.74 MB"), (10**18, "888.18 PB")],
)
def test_bytes_for_people(size: int, text: str) -> None:
    assert accel_state.convert_bytes(size) == text


def test_names() -> None:
    assert accel_state.get_pretty_name(torch.nn.Linear(1, 1)) == "Linear"
    assert accel_state.get_pretty_name([].append) == "list.append"
    assert accel_state.recursive_getattr(torch, "nn.Linear.__name__") == "Linear"
    assert accel_state.are_libraries_initialized("json", "not_there") == ["json"]
    assert accel_state.do_nothing(1, x=2) is None
    assert accel_state.DistributedOperationException is CollectiveMismatchError


def test_dicts_are_merged_into_the_second() -> None:
    into = {"a": {"c": 2}, "d": 3}
    assert accel_state.merge_dicts({"a": {"b": 1}, "e": {"f": 4}}, into) is into
    assert into == {"a": {"b": 1, "c": 2}, "d": 3, "e": {"f": 4}}


def test_ports() -> None:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
        assert not accel_state.is_port_in_use(port)
        listener.listen()
        assert accel_state.is_port_in_use(port) and accel_state.is_port_in_use(str(port))


@pytest.mark.parametrize(("release", "warns"), [("5.4.0-42-generic", True), ("5.5.1", False), ("6.1", False)])
def test_old_kernels_are_named(
    release: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "uname", lambda: platform.uname_result("Linux", "n", release, "v", "x86_64"))
    with caplog.at_level(logging.WARNING):
        accel_state.check_os_kernel()
    assert (release in caplog.text) is warns


def test_the_launchers_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accel_state.get_cpu_distributed_information() == hardware.CPUInformation()
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "MASTER_ADDR": "h", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    found = accel_state.get_cpu_distributed_information()
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (1, 2, 1, 2)


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    """An nvidia-smi that says what it is told to."""
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncase "$1" in *name*) echo "{name}"; echo "{name}";; *) echo {version};; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("name", "version", "is_supported"),
    [
        ("NVIDIA GeForce RTX 4090", "535.10.01", False),
        ("NVIDIA GeForce RTX 4090", "550.54.14", True),
        ("NVIDIA H200", "535.10.01", True),
    ],
)
def test_consumer_gpus_have_no_peer_to_peer(
    name: str, version: str, is_supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, monkeypatch, name, version)
    assert accel_state.get_gpu_info() == ([name, name], 2)
    assert accel_state.check_cuda_p2p_ib_support() is is_supported


def test_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="nvidia-smi is not on the PATH"):
        accel_state.get_gpu_info()
    assert accel_state.check_cuda_p2p_ib_support()


def test_core_lists() -> None:
    assert hardware._cores("0-2,8\n") == {0, 1, 2, 8}


@pytest.mark.skipif(torch.cuda.is_available(), reason="it has an effect here")
def test_numa_without_a_gpu_says_that_it_has_no_effect() -> None:
    hardware.set_numa_affinity.cache_clear()
    with pytest.warns(UserWarning, match="no effect here"):
        accel_state.set_numa_affinity(0)


def test_a_tensor_for_all(fresh_state: None) -> None:
    assert accel_state.copy_tensor_to_devices(torch.ones(2)).tolist() == [1, 1]
    with pytest.raises(ValueError, match="rank 0 has to give a tensor"):
        accel_state.copy_tensor_to_devices()
