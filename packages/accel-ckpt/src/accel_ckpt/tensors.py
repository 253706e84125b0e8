"""Tensors to safetensors files and back: written in a stream with a checksum, read as views of a mapped file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accel_state.errors import CheckpointCorruptError, CheckpointError

from .boxes import Box, is_sharded, local_part
from .durable import FileEntry, write_file, write_unhashed
from .names import unsharded

# Below this, threads cost more than they bring.
PARALLEL_BYTES = 1 << 24
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
class Piece:
    """A box of a tensor and the file that holds it, under the tensor's key."""

    file: str
    box: Box


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """What a tensor is and where it lies: in one piece or, of a sharded one, in several that do not overlap.

    Args:
        dtype: torch's name without the `torch.`.
        shape: of the whole.
        pieces: at least one, in the order of their offsets.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def file(self) -> str:
        """The file; of a tensor in shards, the name that theirs are made from."""
        return unsharded(self.pieces[0].file)

    @property
    def is_whole(self) -> bool:
        return len(self.pieces) == 1 and self.pieces[0].box.shape == self.shape


def dtype_name(tensor: Tensor) -> str:
    """torch's name of a tensor's type without the `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def check_storable(tensor: Tensor, where: str) -> Tensor:
    """The plain tensor behind a tensor or parameter, or an error that names the place and the reason."""
    if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and not is_sharded(tensor):
        reason = f"is a {type(tensor).__module__}.{type(tensor).__qualname__}"
    elif is_sharded(tensor) and any(p.is_partial() for p in tensor.placements):  # type: ignore[attr-defined]
        reason = "is a DTensor with partial placements, whose values are not summed yet"
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
    local = local_part(tensor)
    # A rank's part may be empty, and have no address, where those of other ranks are not.
    place = local.data_ptr() if local is tensor or local.numel() else local.untyped_storage()._cdata  # noqa: SLF001
    return tensor.device, place, tensor.dtype, tuple(tensor.shape), tensor.stride()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write a safetensors file in one pass, flushed to the disk.

    Device tensors are copied one at a time, so that the peak of host memory is the largest of them.
    """
    return write_file(path, *_content(tensors, {}))


def write_tensors_unhashed(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """The same for other readers, with further metadata, and a tenth quicker for want of a checksum."""
    write_unhashed(path, *_content(tensors, metadata))


def _content(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[Iterator[bytes | memoryview], int]:
    """The parts of a safetensors file, and its size in bytes."""
    # Wide types first: each tensor then starts at a multiple of its item size, and readers can map it.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
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
    return _parts(text, [tensors[name] for name in order]), 8 + len(text) + offset


def write_tensor_files(directory: Path, files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, FileEntry]:
    """Write several files, `write_tensors` each; large ones two at a time."""
    total_bytes = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    if total_bytes < PARALLEL_BYTES or len(files) < 2:
        return {file: write_tensors(directory / file, tensors) for file, tensors in files.items()}
    with ThreadPoolExecutor(max_workers=2) as pool:
        entries = pool.map(lambda item: write_tensors(directory / item[0], item[1]), files.items())
        return dict(zip(files, entries, strict=True))


def _parts(header: bytes, tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors:
        if tensor.numel():
            flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
            yield flat.view(torch.uint8).numpy().data


def read_tensors(path: Path, expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Tensor]:
    """All tensors of a file as views of its private mapping: nothing is read until it is used.

    Args:
        path: the file; its checksum should have been verified.
        expected: key -> dtype and shape that the manifest says it has there.

    Raises:
        CheckpointCorruptError: the file is not safetensors, or holds something else than expected.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointCorruptError(f"{path} is not a readable safetensors file: {error}") from error
    if found.keys() != expected.keys():
        odd = ", ".join(sorted(found.keys() ^ expected.keys())[:5])
        raise CheckpointCorruptError(f"{path} does not hold the tensors that its manifest lists; they differ in: {odd}")
    return {name: _typed(found[name], *entry, f"{path}: {name}") for name, entry in expected.items()}


def _typed(tensor: Tensor, name: str, shape: tuple[int, ...], where: str) -> Tensor:
    dtype = DTYPES[name]
    if dtype in _AS_BYTES and tensor.dtype is torch.uint8:
        if tensor.numel() != math.prod(shape) * dtype.itemsize:
            raise CheckpointCorruptError(f"{where} has {tensor.numel()} bytes, its manifest says {name} {shape}")
        if tensor.data_ptr() % dtype.itemsize:
            tensor = tensor.clone()  # bytes come last in a file, so they may lie at an odd address
        return tensor.reshape(-1).view(dtype).reshape(shape)
    if tensor.dtype is not dtype or tuple(tensor.shape) != shape:
        raise CheckpointCorruptError(
            f"{where} is {tensor.dtype} {tuple(tensor.shape)}, its manifest says {name} {shape}"
        )
    return tensor
