"""What CUDA_VISIBLE_DEVICES leaves, on machines made up here and on this one."""

import pytest

from accel_state import device_count
from accel_state.device_count import CudaHardware, count_devices
from accel_state.errors import DeviceError

FOUR = CudaHardware([f"GPU-{letter}{letter}-1" for letter in "abcd"], [False] * 4)
SPLIT = CudaHardware(["GPU-aa-1"], [True])


@pytest.fixture
def hardware(monkeypatch):
    def pretend(found):
        monkeypatch.setattr(device_count, "_rocm_device_count", lambda nodes: 0)
        monkeypatch.setattr(device_count, "_nvidia_hardware", lambda: found)

    return pretend


@pytest.mark.parametrize(
    ("selection", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("0,2", 2),
        (" 3 , 1 ", 2),
        ("0,-1,1", 1),  # what follows an invalid entry is hidden
        ("0,9,1", 1),
        ("9", 0),
        ("0,0", 0),  # a repetition voids the list
        ("GPU-aa", 1),
        ("GPU-bb-1,GPU-cc-1", 2),
        ("GPU-", 0),  # fits several
        ("GPU-zz", 0),
        ("GPU-aa,0", 0),  # the same device twice
        ("MIG-1234", 1),
        ("MIG-1234,MIG-5678", 1),  # a process sees one instance
        ("MIG-GPU-aa-1/1/0", 1),
        ("none", 0),
    ],
)
def test_selections(hardware, selection, count):
    hardware(FOUR)
    assert count_devices("cuda", {} if selection is None else {"CUDA_VISIBLE_DEVICES": selection}) == count


def test_a_split_gpu_counts_once(hardware):
    hardware(SPLIT)
    assert count_devices("cuda", {}) == 1


@pytest.mark.parametrize("selection", [None, "0", "MIG-1", "GPU-aa"])
def test_no_hardware_is_no_device_whatever_is_selected(hardware, selection):
    hardware(CudaHardware([], []))
    assert count_devices("cuda", {} if selection is None else {"CUDA_VISIBLE_DEVICES": selection}) == 0


def test_rocm_counts_nodes_with_simd_units(tmp_path):
    for node, simds in enumerate([0, 120, 120]):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "properties").write_text(f"cpu_cores_count 8\nsimd_count {simds}\n")
    (tmp_path / "3").mkdir()  # without readable properties
    assert device_count._rocm_device_count(tmp_path) == 2
    assert device_count._rocm_device_count(tmp_path / "absent") == 0


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 4),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"HIP_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_rocm_selections(monkeypatch, environ, count):
    monkeypatch.setattr(device_count, "_rocm_device_count", lambda nodes: 4)
    assert count_devices("cuda", environ) == count


def test_an_unknown_kind_is_refused():
    with pytest.raises(DeviceError, match="'gpu' cannot be counted: known are cuda, mps"):
        count_devices("gpu")


def test_the_count_is_what_torch_says(ranks):
    def body():
        import torch

        return torch.cuda.device_count(), int(torch.backends.mps.is_available())

    assert ranks(body, 1) == [(count_devices("cuda"), count_devices("mps"))]
