"""Tensor files: every type there and back, readable by safetensors itself, and lies found out."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.parameter import UninitializedParameter

from accel_ckpt.durable import hash_file
from accel_ckpt.tensors import DTYPES, check_storable, dtype_name, read_tensors, write_tensors
from accel_state.errors import CheckpointCorruptError, CheckpointError


def random_bytes(dtype: torch.dtype, count: int) -> torch.Tensor:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype)


def described(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return dtype_name(tensor), tuple(tensor.shape)


def as_bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 1, 2)], ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype, shape):
    odd = torch.ones(3, dtype=torch.uint8)  # shifts what follows to an odd address
    tensor = random_bytes(dtype, torch.Size(shape).numel()).reshape(shape)
    given = {"x": tensor, "odd": odd}
    write_tensors(tmp_path / "f", given)
    back = read_tensors(tmp_path / "f", {name: described(t) for name, t in given.items()})
    assert back["x"].dtype == dtype
    assert back["x"].shape == tensor.shape
    assert as_bytes(back["x"]) == as_bytes(tensor)


def test_safetensors_reads_the_file(tmp_path):
    tensors = {
        "a": torch.randn(3, 4),
        "t": torch.randn(3, 4).T,
        "h": torch.randn(5).bfloat16(),
        "i": torch.arange(3),
        "s": torch.tensor(True),
    }
    entry = write_tensors(tmp_path / "f.safetensors", tensors)
    back = load_file(tmp_path / "f.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert entry == hash_file(tmp_path / "f.safetensors")


def test_conjugate_and_negative_views_are_resolved(tmp_path):
    base = torch.tensor([1 + 2j, 3 - 1j])
    given = {"conj": base.conj(), "neg": base.conj().imag}
    write_tensors(tmp_path / "f", given)
    back = read_tensors(tmp_path / "f", {name: described(t) for name, t in given.items()})
    assert back["conj"].tolist() == [1 - 2j, 3 + 1j]
    assert back["neg"].tolist() == [-2, 1]


def test_an_existing_file_is_never_written_over(tmp_path):
    (tmp_path / "f").write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "f", {"a": torch.ones(1)})
    assert (tmp_path / "f").read_text() == "mine"


def lie(path, change):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header, length_field = change(header)
    text = json.dumps(header).encode()
    path.write_bytes((length_field or len(text)).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda h: (h, 1 << 60),
        lambda h: (h, 3),
        lambda h: ({**h, "x": {**h["x"], "data_offsets": [0, 1 << 40]}}, None),
        lambda h: ({**h, "x": {**h["x"], "data_offsets": [8, 0]}}, None),
        lambda h: ({**h, "x": {**h["x"], "shape": [1 << 62, 4]}}, None),
        lambda h: ({**h, "y": h["x"]}, None),
        lambda h: ({**h, "x": {**h["x"], "dtype": "F17"}}, None),
        lambda h: ({"z": h["x"]}, None),
        lambda h: ({**h, "x": {**h["x"], "dtype": "I32"}}, None),
        lambda h: ({**h, "x": {**h["x"], "shape": [2, 1]}}, None),
    ],
)
def test_headers_that_lie_are_found_out(tmp_path, change):
    given = {"x": torch.arange(2.0)}
    write_tensors(tmp_path / "f", given)
    lie(tmp_path / "f", change)
    with pytest.raises(CheckpointCorruptError, match="f"):
        read_tensors(tmp_path / "f", {"x": described(given["x"])})


def test_byte_forms_with_a_wrong_size_are_found_out(tmp_path):
    write_tensors(tmp_path / "f", {"x": torch.zeros(5, dtype=torch.uint8)})
    with pytest.raises(CheckpointCorruptError, match="has 5 bytes"):
        read_tensors(tmp_path / "f", {"x": described(torch.zeros(1, dtype=torch.complex64))})


def test_a_lazy_parameter_cannot_be_stored():
    with pytest.raises(CheckpointError, match=r"net\.weight is a .*UninitializedParameter"):
        check_storable(UninitializedParameter(), "net.weight")
