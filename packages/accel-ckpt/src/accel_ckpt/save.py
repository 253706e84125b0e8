"""Saving: capture on every rank, stage, write, agree, commit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_state.errors import CheckpointError

from .codec import Codec, Encoder, dump_json
from .commit import Staging, commit, discard, open_staging, real_directory
from .durable import FileEntry, flush_file, hash_file, os_reason, write_file
from .manifest import Manifest, ObjectEntry, check_file_name, dump_manifest, software_versions
from .models import capture_model
from .names import MANIFEST_NAME, OWNER_NAME, STATE_NAME, STATE_TENSORS_NAME, model_file, optimizer_file, rng_file
from .objects import Captured, capture_stateful, check_objects, kind_of
from .optimizers import capture_optimizer, parameter_names
from .ranks import World, current_world, from_main, together
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


def save_checkpoint(
    directory: str | os.PathLike[str],
    objects: Mapping[str, Any],
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    metadata: Any = None,
    codecs: Sequence[Codec] = (),
    rng: bool = True,
    before_commit: Callable[[Path], None] | None = None,
) -> Path:
    """Save objects into a directory, wholly or not at all. All ranks call it, with the same arguments.

    Args:
        directory: becomes the checkpoint. If it exists, the checkpoint in it is replaced at one instant for readers of
            accel; other files in it stay. Foreign readers are only safe with a new directory.
        objects: name -> model, optimizer, or anything with state_dict and load_state_dict. Equal on all ranks but for
            their generators. The names are what loading goes by.
        step: the number of updates made.
        metrics: numbers that retention may compare.
        metadata: plain values to get back.
        codecs: for types that states hold beyond numbers, strings, lists, dicts and tensors.
        rng: save each rank's random generators.
        before_commit: called on every rank with the directory being filled; what it writes there belongs to the
            checkpoint.

    Returns:
        The real path of the committed checkpoint.

    Raises:
        CheckpointError: on all ranks, naming what failed where; nothing was committed and what was staged is gone.

    Cost: writes the state once and flushes it to the disk; three object gathers of a few hundred bytes per rank.
    """
    world, target = current_world(), real_directory(directory)
    doing = f"saving to {target}"
    snapshot: Snapshot | None = None
    staging: Staging | None = None

    def prepare() -> str:
        nonlocal snapshot, staging
        snapshot = take_snapshot(world, objects, step, metrics, metadata, codecs, rng)
        if world.is_main:
            staging = open_staging(target)
        return str(staging.path) if staging else ""

    def write() -> dict[str, FileEntry]:
        assert snapshot is not None
        return write_snapshot(path, world, snapshot)

    def finish() -> str:
        assert snapshot is not None
        assert staging is not None
        seal(staging, snapshot, files)
        return str(staging.target)

    committed = False
    try:
        path = Path(together(world, doing, prepare)[0])
        files = {name: entry for own in together(world, doing, write) for name, entry in own.items()}
        if before_commit is not None:
            together(world, doing, lambda: before_commit(path))
        target = Path(from_main(world, doing, finish))
        committed = True
    finally:
        if staging is not None and not committed:
            discard(staging)
    return target


def take_snapshot(
    world: World,
    objects: Mapping[str, Any],
    step: int | None,
    metrics: Mapping[str, float] | None,
    metadata: Any,
    codecs: Sequence[Codec],
    rng: bool,
) -> Snapshot:
    """Ask every object for its state and put it into the form of the files, without copying tensors."""
    from accel_state import capture_rng_state, current_seed

    check_objects(objects)
    if step is not None and (type(step) is not int or step < 0):
        raise CheckpointError(f"step={step!r} is not a count of updates; give an int of at least 0.")
    names = parameter_names(objects)
    captured: dict[str, Captured] = {}
    files: dict[str, str] = {}
    counts = {"model": 0, "optimizer": 0}
    for name, value in objects.items():
        kind = kind_of(value)
        if kind == "stateful":
            captured[name] = capture_stateful(name, value, codecs)
            continue
        make_file = model_file if kind == "model" else optimizer_file
        files[name] = make_file(counts[kind])
        counts[kind] += 1
        if kind == "model":
            captured[name] = capture_model(name, value, codecs)
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


def seal(staging: Staging, snapshot: Snapshot, files: Mapping[str, FileEntry]) -> None:
    """Write the manifest over all files that are there, and commit."""
    try:
        everything = {**files, **_files_of_hooks(staging.path, files)}
        if lost := sorted(name for name in everything if not (staging.path / name).is_file()):
            raise CheckpointError(
                f"written by a rank but not seen by rank 0: {', '.join(lost)}. All ranks need one file system."
            )
        manifest = replace(snapshot.manifest, files=everything, objects=_entries(snapshot))
        write_file(staging.path / MANIFEST_NAME, [dump_manifest(manifest)])
        commit(staging, everything)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot commit {staging.target}: {os_reason(error)}") from error


def _entries(snapshot: Snapshot) -> dict[str, ObjectEntry]:
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


def _files_of_hooks(path: Path, known: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    found = {}
    for name in _relative_files(path):
        if name in known or name == OWNER_NAME:
            continue
        if (path / name).is_symlink():
            raise CheckpointError(f"{name}, written for the checkpoint, is a symbolic link; copy the file instead.")
        flush_file(path / check_file_name(name))
        found[name] = hash_file(path / name)
    return found


def _relative_files(path: Path) -> Iterator[str]:
    for directory, _, names in os.walk(path):
        for name in names:
            yield Path(directory, name).relative_to(path).as_posix()
