"""Tensors to safetensors files and back: written in a stream with a checksum, read as views of a mapped file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accel_state.errors import CheckpointCorruptError, CheckpointError

from .durable import FileEntry, write_file

# What every safetensors release that we accept can name. Other types are stored as bytes with one more dim, and the
# manifest says what they are.
_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_AS_BYTES = (
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
DTYPES: dict[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in (*_NAMES, *_AS_BYTES)}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where a tensor lies and what it is; `dtype` is torch's name without the `torch.`."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def describe(tensor: Tensor, file: str) -> TensorEntry:
    """The manifest's entry of a tensor."""
    return TensorEntry(file=file, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def check_storable(tensor: Tensor, where: str) -> Tensor:
    """The plain tensor behind a tensor or parameter, or an error that names the place and the reason."""
    if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        reason = f"is a {type(tensor).__module__}.{type(tensor).__qualname__}"
    elif tensor.layout is not torch.strided:
        reason = f"has the layout {tensor.layout}"
    elif tensor.device.type == "meta":
        reason = "is on the meta device and has no values"
    elif tensor.dtype not in _NAMES and tensor.dtype not in _AS_BYTES:
        reason = f"has the dtype {tensor.dtype}"
    else:
        return tensor.detach()
    raise CheckpointError(
        f"{where} {reason}; a checkpoint holds plain dense tensors. Convert it in state_dict(), or pass a Codec for it."
    )


def same_memory_key(tensor: Tensor) -> tuple[Any, ...] | None:
    """Equal for tensors that are the same numbers in the same memory; None where that cannot be told (no elements)."""
    if tensor.numel() == 0:
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FileEntry:
    """Write a safetensors file in one pass, flushed to the disk.

    Device tensors are copied one at a time, so that the peak of host memory is the largest of them.
    """
    # Wide types first: each tensor then starts at a multiple of its item size, and readers can map it.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        if (dtype_name := _NAMES.get(tensor.dtype)) is None:
            dtype_name, shape = "U8", [*shape, tensor.element_size()]
        header[name] = {"dtype": dtype_name, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return write_file(path, _parts(text, [tensors[name] for name in order]))


def _parts(header: bytes, tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors:
        if tensor.numel():
            flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
            yield flat.view(torch.uint8).numpy().data


def read_tensors(path: Path, expected: Mapping[str, TensorEntry]) -> dict[str, Tensor]:
    """All tensors of a file as views of its private mapping: nothing is read until it is used.

    Args:
        path: the file; its checksum should have been verified.
        expected: what the manifest says that it holds.

    Raises:
        CheckpointCorruptError: the file is not safetensors, or holds something else than expected.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise CheckpointCorruptError(f"{path} is not a readable safetensors file: {error}") from error
    if found.keys() != expected.keys():
        odd = ", ".join(sorted(found.keys() ^ expected.keys())[:5])
        raise CheckpointCorruptError(f"{path} does not hold the tensors that its manifest lists; they differ in: {odd}")
    return {name: _typed(found[name], entry, f"{path}: {name}") for name, entry in expected.items()}


def _typed(tensor: Tensor, entry: TensorEntry, where: str) -> Tensor:
    dtype = DTYPES[entry.dtype]
    if dtype in _AS_BYTES and tensor.dtype is torch.uint8:
        if tensor.numel() != math.prod(entry.shape) * dtype.itemsize:
            raise CheckpointCorruptError(f"{where} has {tensor.numel()} bytes, its manifest says {entry}")
        if tensor.data_ptr() % dtype.itemsize:
            tensor = tensor.clone()  # bytes come last in a file, so they may lie at an odd address
        return tensor.reshape(-1).view(dtype).reshape(entry.shape)
    if tensor.dtype is not dtype or tuple(tensor.shape) != entry.shape:
        raise CheckpointCorruptError(
            f"{where} is {tensor.dtype} {tuple(tensor.shape)}, its manifest says {entry.dtype} {entry.shape}"
        )
    return tensor
