"""What one rank contributes to a checkpoint: taken at one moment, written at leisure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from accel_state.errors import CheckpointError

from .codec import Codec, Encoder, dump_json
from .durable import FileEntry, write_file
from .layout import Plan
from .manifest import Manifest, ObjectEntry, software_versions
from .models import capture_model
from .names import STATE_NAME, model_file, optimizer_file, rng_file
from .objects import Captured, capture_stateful, check_models, check_objects, kind_of
from .optimizers import capture_optimizer, names_in_parts, parameter_names
from .ranks import World
from .tensors import write_tensor_files


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a save was asked to hold; see `save_checkpoint`."""

    objects: Mapping[str, Any]
    step: int | None
    metrics: Mapping[str, float] | None
    metadata: Any
    codecs: Sequence[Codec]
    rng: bool


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that one rank contributes, referring to live tensors.

    Args:
        objects: name -> state; equal on all ranks, written by rank 0, but for those in parts.
        files: name -> the file of its bulk tensors, for models and optimizers.
        rng: the generators that this rank writes, encoded, by the rank that has them; empty where none are saved.
        manifest: without files and objects.
    """

    objects: Mapping[str, Captured]
    files: Mapping[str, str]
    rng: Mapping[int, Any]
    manifest: Manifest


def take_snapshot(world: World, contents: Contents, instead: Mapping[str, Mapping[str, Any] | None]) -> Snapshot:
    """Ask every object for its state and put it into the form of the files, without copying tensors.

    Args:
        instead: model's name -> weights to save in place of its own; None leaves the model out.
    """
    from accel_state import capture_rng_state, current_seed

    objects, step, codecs = contents.objects, contents.step, contents.codecs
    check_objects(objects)
    if step is not None and (type(step) is not int or step < 0):
        raise CheckpointError(f"step={step!r} is not a count of updates; give an int of at least 0.")
    names, in_parts = parameter_names(objects), names_in_parts(objects)
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
            captured[name] = capture_optimizer(name, value, names, codecs, in_parts)
    manifest = Manifest(
        step=step,
        seed=current_seed(),
        world_size=world.size,
        created_unix_s=time.time(),
        metrics=_check_metrics(contents.metrics or {}),
        metadata=Encoder(codecs, inline=True).encode(contents.metadata, "metadata"),
        versions=software_versions(),
        files={},
        objects={},
    )
    own = {world.rank: Encoder(inline=True).encode(capture_rng_state(), "random generators")} if contents.rng else {}
    return Snapshot(objects=captured, files=files, rng=own, manifest=manifest)


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


def write_snapshot(
    path: Path, snapshot: Snapshot, tensors: Mapping[str, Mapping[str, Tensor]], *, with_state: bool
) -> dict[str, FileEntry]:
    """Write this rank's files into the staging directory, each flushed to the disk.

    Args:
        tensors: file -> key -> memory, see `Plan.tensors_of`.
        with_state: write the JSON part of the objects too.
    """
    written = write_tensor_files(path, tensors)
    if with_state:
        trees = {name: captured.tree for name, captured in snapshot.objects.items()}
        written[STATE_NAME] = write_file(path / STATE_NAME, [dump_json(trees).encode()])
    return {**written, **write_generators(path, snapshot)}


def write_generators(path: Path, snapshot: Snapshot) -> dict[str, FileEntry]:
    """Write the random generators that this rank writes, if they are saved."""
    texts = {rng_file(rank): dump_json(state).encode() for rank, state in snapshot.rng.items()}
    return {name: write_file(path / name, [text]) for name, text in texts.items()}


def manifest_entries(snapshot: Snapshot, plan: Plan) -> dict[str, ObjectEntry]:
    """What the manifest says of each object."""
    return {
        name: ObjectEntry(
            kind=captured.kind,
            type=captured.type,
            tensors=plan.entries[name],
            aliases=captured.aliases,
            shapes=captured.shapes,
        )
        for name, captured in snapshot.objects.items()
    }
