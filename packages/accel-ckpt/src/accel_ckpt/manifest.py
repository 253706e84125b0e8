"""The manifest: what a checkpoint holds, written last, so that a directory with one is whole.

{"xxh3_128": <of the body's canonical text>, "manifest": {"format": ..., "files": ..., "objects": ..., ...}}
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import xxhash

from accel_state.errors import CheckpointCorruptError, CheckpointError

from .boxes import Box, overlap, whole_box
from .codec import Encoder, decode, load_json
from .durable import FileEntry, read_json_bytes
from .names import FORMAT_NAME, FORMAT_VERSION, JOURNAL_NAME, MANIFEST_NAME, OWNER_NAME
from .tensors import DTYPES, Piece, TensorEntry

KINDS = ("model", "optimizer", "stateful")


@dataclass(frozen=True, kw_only=True)
class ObjectEntry:
    """One saved object.

    Args:
        kind: model, optimizer or stateful: how its state is laid out.
        type: its class's name.
        tensors: key in the file -> where and what.
        aliases: a tied tensor's other name -> the name that it is stored under (models).
        shapes: the global shape of each parameter that an optimizer updates, by parameter name (optimizers).
    """

    kind: str
    type: str
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that is known about a checkpoint without reading its data.

    Args:
        step: the update that it was saved at, if the caller counts them.
        seed: the run's seed (`set_seed`), from which ranks without saved generators are seeded.
        world_size: ranks that saved.
        created_unix_s: seconds since 1970, by the saver's clock; for display only.
        metrics: numbers that retention may compare.
        metadata: the caller's own values, encoded.
        versions: of the software that wrote it.
        files: relative POSIX path -> size and checksum.
        objects: name -> entry.
    """

    step: int | None
    seed: int | None
    world_size: int
    created_unix_s: float
    metrics: Mapping[str, float]
    metadata: Any
    versions: Mapping[str, str]
    files: Mapping[str, FileEntry]
    objects: Mapping[str, ObjectEntry]


@cache
def software_versions() -> dict[str, str]:
    """What wrote a checkpoint."""
    return {"accel-ckpt": version("accel-ckpt"), "torch": torch.__version__, "python": platform.python_version()}


# ---------------------------------------------------------------- writing


def dump_manifest(manifest: Manifest) -> bytes:
    """The manifest's text, with the checksum of its body."""
    body = {"format": FORMAT_NAME, "format_version": FORMAT_VERSION, **dataclasses.asdict(manifest)}
    for name, entry in manifest.objects.items():
        body["objects"][name]["tensors"] = {key: _tensor_json(tensor) for key, tensor in entry.tensors.items()}
    body["metrics"] = Encoder(inline=True).encode(dict(manifest.metrics), "metrics")
    text = _canonical(body)
    return f'{{"xxh3_128":"{xxhash.xxh3_128_hexdigest(text.encode())}","manifest":{text}}}\n'.encode()


def _tensor_json(entry: TensorEntry) -> dict[str, Any]:
    """`file`, or for tensors in several pieces `pieces`: [file, offset, shape] each."""
    what = {"dtype": entry.dtype, "shape": entry.shape}
    if entry.is_whole:
        return {"file": entry.pieces[0].file, **what}
    return {**what, "pieces": [[piece.file, piece.box.offset, piece.box.shape] for piece in entry.pieces]}


def _canonical(body: Any) -> str:
    return json.dumps(body, allow_nan=False, separators=(",", ":"))


# ---------------------------------------------------------------- reading


def manifest_path(directory: Path) -> Path | None:
    """The manifest in force: of a replacement under way if there is one, else the directory's own, else None."""
    for path in (directory / JOURNAL_NAME / MANIFEST_NAME, directory / MANIFEST_NAME):
        if path.is_file():
            return path
    return None


def data_path(directory: Path, name: str) -> Path:
    """Where a file of the checkpoint in force lies now.

    While a replacement is under way, files move one by one from the journal into the directory, never back; the
    journal is looked at only while it has a manifest, for without one it is a leftover.
    """
    journal = directory / JOURNAL_NAME
    if (journal / MANIFEST_NAME).is_file() and (journal / name).is_file():
        return journal / name
    return directory / name


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest file.

    Raises:
        CheckpointCorruptError: damaged, or with names that lead out of the directory.
        CheckpointError: written in a newer format than this package reads.
    """
    try:
        text = read_json_bytes(path)
    except OSError as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {error}") from error
    whole = load_json(text, str(path))
    if not isinstance(whole, dict) or whole.keys() != {"xxh3_128", "manifest"}:
        raise CheckpointCorruptError(f"{path} is not a manifest of accel-ckpt")
    body = whole["manifest"]
    digest = xxhash.xxh3_128_hexdigest(_canonical(body).encode())
    if digest != whole["xxh3_128"]:
        raise CheckpointCorruptError(f"{path} was altered: its checksum is {digest}, it says {whole['xxh3_128']}")
    if body.get("format") != FORMAT_NAME or not isinstance(body.get("format_version"), int):
        raise CheckpointCorruptError(f"{path} is not a manifest of accel-ckpt")
    if body["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {body['format_version']}, this accel-ckpt reads up to {FORMAT_VERSION}; "
            "install a newer accel-ckpt."
        )
    try:
        return _parse(body, str(path))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorruptError(f"{path} has a field that cannot be read: {error!r}") from error


def _parse(body: dict[str, Any], where: str) -> Manifest:
    files = {_safe_name(name): _file_entry(entry) for name, entry in body["files"].items()}
    objects = {name: _object_entry(entry, files) for name, entry in body["objects"].items()}
    return Manifest(
        step=_optional_int(body["step"]),
        seed=_optional_int(body["seed"]),
        world_size=int(body["world_size"]),
        created_unix_s=float(body["created_unix_s"]),
        metrics={name: float(v) for name, v in decode(body["metrics"], {}, where=f"{where}: metrics").items()},
        metadata=body["metadata"],
        versions=dict(body["versions"]),
        files=files,
        objects=objects,
    )


def _safe_name(name: str) -> str:
    """A file's name, refused where it could lead out of the checkpoint or to one of our own control files."""
    parts = PurePosixPath(name).parts
    reserved = parts and parts[0] in (MANIFEST_NAME, JOURNAL_NAME, OWNER_NAME)
    if not parts or reserved or name != "/".join(parts) or ".." in parts or "\\" in name or "\0" in name or ":" in name:
        raise ValueError(f"the file name {name!r} is not allowed in a checkpoint")
    if name.startswith("/"):
        raise ValueError(f"the file name {name!r} is absolute")
    return name


def check_file_name(name: str) -> str:
    """Refuse a name that a reader would refuse, before it is written."""
    try:
        return _safe_name(name)
    except ValueError as error:
        raise CheckpointError(f"{error}; rename it") from error


def _file_entry(entry: dict[str, Any]) -> FileEntry:
    if type(entry["size_bytes"]) is not int or entry["size_bytes"] < 0 or not isinstance(entry["xxh3_128"], str):
        raise ValueError(f"bad file entry {entry!r}")
    return FileEntry(size_bytes=entry["size_bytes"], xxh3_128=entry["xxh3_128"])


def _object_entry(entry: dict[str, Any], files: Mapping[str, FileEntry]) -> ObjectEntry:
    if entry["kind"] not in KINDS:
        raise ValueError(f"unknown kind of object {entry['kind']!r}")
    tensors = {key: _tensor_entry(tensor) for key, tensor in entry["tensors"].items()}
    for key, tensor in tensors.items():
        if strange := [piece.file for piece in tensor.pieces if piece.file not in files]:
            raise ValueError(f"tensor {key!r} lies in {strange}, which are not among the files")
    aliases = _strings(entry["aliases"])
    if lost := set(aliases.values()) - tensors.keys():
        raise ValueError(f"aliases of {sorted(lost)}, which are not among the tensors")
    return ObjectEntry(
        kind=entry["kind"],
        type=str(entry["type"]),
        tensors=tensors,
        aliases=aliases,
        shapes={name: _shape(shape) for name, shape in entry["shapes"].items()},
    )


def _tensor_entry(entry: dict[str, Any]) -> TensorEntry:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"unknown dtype {entry['dtype']!r}")
    shape = _shape(entry["shape"])
    if math.prod(shape) * DTYPES[entry["dtype"]].itemsize >= 1 << 63:
        raise ValueError(f"impossible shape {shape}")
    if "pieces" in entry:
        pieces = tuple(Piece(file=file, box=Box(_shape(at), _shape(sizes))) for file, at, sizes in entry["pieces"])
        _check_pieces(shape, [piece.box for piece in pieces])
    else:
        pieces = (Piece(file=entry["file"], box=whole_box(shape)),)
    if not all(isinstance(piece.file, str) for piece in pieces):
        raise ValueError(f"bad file names in {entry!r}")
    return TensorEntry(dtype=entry["dtype"], shape=shape, pieces=pieces)


def _check_pieces(shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Boxes within a tensor that cover all of it, once."""
    if any(len(box.offset) != len(shape) or len(box.shape) != len(shape) for box in boxes):
        raise ValueError(f"pieces of other dims than the tensor's {shape}")
    whole = whole_box(shape)
    if any(whole.common(box) != box for box in boxes):
        raise ValueError(f"a piece reaches out of the tensor of shape {shape}, or is empty")
    if sum(box.numel for box in boxes) != whole.numel:
        raise ValueError(f"the pieces do not make up the tensor of shape {shape}")
    if overlap(boxes):
        raise ValueError(f"pieces of the tensor of shape {shape} overlap")


def _shape(shape: list[int]) -> tuple[int, ...]:
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"bad shape {shape!r}")
    return tuple(shape)


def _strings(mapping: dict[str, str]) -> dict[str, str]:
    if not all(isinstance(value, str) for value in mapping.values()):
        raise ValueError(f"not all strings: {mapping!r}")
    return dict(mapping)


def _optional_int(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise ValueError(f"{value!r} is not an integer")
    return value
