"""What one rank contributes to a checkpoint: taken at one moment, written at leisure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_state.errors import CheckpointError

from .codec import Codec, Encoder, dump_json
from .durable import FileEntry, write_file
from .manifest import Manifest, ObjectEntry, software_versions
from .models import capture_model
from .names import STATE_NAME, STATE_TENSORS_NAME, model_file, optimizer_file, rng_file
from .objects import Captured, capture_stateful, check_models, check_objects, kind_of
from .optimizers import capture_optimizer, parameter_names
from .ranks import World
from .tensors import describe, write_tensors


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that one rank contributes, referring to live tensors.

    Args:
        objects: name -> state; equal on all ranks, written by rank 0.
        files: name -> the file of its bulk tensors, for models and optimizers.
        rng: this rank's generators, encoded; None where they are not saved.
        manifest: without files and objects.
    """

    objects: Mapping[str, Captured]
    files: Mapping[str, str]
    rng: Any
    manifest: Manifest


def take_snapshot(
    world: World,
    objects: Mapping[str, Any],
    step: int | None,
    metrics: Mapping[str, float] | None,
    metadata: Any,
    codecs: Sequence[Codec],
    rng: bool,
    instead: Mapping[str, Mapping[str, Any] | None],
) -> Snapshot:
    """Ask every object for its state and put it into the form of the files, without copying tensors.

    Args:
        instead: model's name -> weights to save in place of its own; None leaves the model out.
    """
    from accel_state import capture_rng_state, current_seed

    check_objects(objects)
    if step is not None and (type(step) is not int or step < 0):
        raise CheckpointError(f"step={step!r} is not a count of updates; give an int of at least 0.")
    names = parameter_names(objects)
    captured: dict[str, Captured] = {}
    files: dict[str, str] = {}
    counts = {"model": 0, "optimizer": 0}
    check_models(objects, instead)
    for name, value in objects.items():
        kind = kind_of(value)
        if kind == "stateful":
            captured[name] = capture_stateful(name, value, codecs)
            continue
        make_file = model_file if kind == "model" else optimizer_file
        file = make_file(counts[kind])
        counts[kind] += 1
        if name in instead and instead[name] is None:
            continue
        files[name] = file
        if kind == "model":
            captured[name] = capture_model(name, value, codecs, instead.get(name))
        else:
            captured[name] = capture_optimizer(name, value, names, codecs)
    manifest = Manifest(
        step=step,
        seed=current_seed(),
        world_size=world.size,
        created_unix_s=time.time(),
        metrics=_check_metrics(metrics or {}),
        metadata=Encoder(codecs, inline=True).encode(metadata, "metadata"),
        versions=software_versions(),
        files={},
        objects={},
    )
    state = Encoder(inline=True).encode(capture_rng_state(), "random generators") if rng else None
    return Snapshot(objects=captured, files=files, rng=state, manifest=manifest)


def _check_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"metrics[{name!r}] is {value!r}, not a number; put other values into metadata."
            ) from error
    return numbers


def write_snapshot(path: Path, world: World, snapshot: Snapshot) -> dict[str, FileEntry]:
    """Write this rank's files into the staging directory, each flushed to the disk."""
    written: dict[str, FileEntry] = {}
    if world.is_main:
        for name, file in snapshot.files.items():
            if snapshot.objects[name].bulk:
                written[file] = write_tensors(path / file, snapshot.objects[name].bulk)
        side = {key: tensor for captured in snapshot.objects.values() for key, tensor in captured.side.items()}
        if side:
            written[STATE_TENSORS_NAME] = write_tensors(path / STATE_TENSORS_NAME, side)
        trees = {name: captured.tree for name, captured in snapshot.objects.items()}
        written[STATE_NAME] = write_file(path / STATE_NAME, [dump_json(trees).encode()])
    if snapshot.rng is not None:
        name = rng_file(world.rank)
        written[name] = write_file(path / name, [dump_json(snapshot.rng).encode()])
    return written


def manifest_entries(snapshot: Snapshot) -> dict[str, ObjectEntry]:
    entries = {}
    for name, captured in snapshot.objects.items():
        bulk = {key: describe(tensor, snapshot.files[name]) for key, tensor in captured.bulk.items()}
        side = {key: describe(tensor, STATE_TENSORS_NAME) for key, tensor in captured.side.items()}
        entries[name] = ObjectEntry(
            kind=captured.kind,
            type=captured.type,
            tensors={**bulk, **side},
            aliases=captured.aliases,
            shapes=captured.shapes,
        )
    return entries


class CopyBuffers:
    """Host memory for private copies of tensors, kept from one save to the next.

    The first copy pays for fresh pages, later ones only for copying. Holds one copy of the state in memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def private(self, snapshot: Snapshot) -> Snapshot:
        """A snapshot whose tensors are copies, good until the next call."""
        used: dict[tuple[str, str], Tensor] = {}
        objects = {}
        for name, captured in snapshot.objects.items():
            bulk = {key: self._copy(used, (name, key), tensor) for key, tensor in captured.bulk.items()}
            side = {key: self._copy(used, ("", key), tensor) for key, tensor in captured.side.items()}
            objects[name] = replace(captured, bulk=bulk, side=side)
        self._buffers = used
        return replace(snapshot, objects=objects)

    def _copy(self, used: dict[tuple[str, str], Tensor], key: tuple[str, str], tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        used[key] = buffer.copy_(tensor)
        return buffer
