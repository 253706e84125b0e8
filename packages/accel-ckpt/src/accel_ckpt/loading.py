"""Loading: find the set in force, verify it, compare it with the objects, and only then change anything."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_state import warn_user
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError, CheckpointNotFoundError

from .codec import Codec, decode, is_reference, load_json
from .commit import real_directory
from .durable import FileEntry, hash_file, os_reason, read_json_bytes
from .manifest import Manifest, ObjectEntry, data_path, manifest_path, read_manifest
from .models import compare_model, load_model
from .names import JOURNAL_NAME, MANIFEST_NAME, STAGING_MARK, STATE_NAME, rng_file
from .objects import check_models, check_objects, compare_stateful, kind_of, load_stateful
from .optimizers import compare_optimizer, load_optimizer, names_in_parts, parameter_names
from .ranks import World, current_world, from_main, together
from .stored import Stored, Wholes, open_tensors

logger = logging.getLogger("accel_ckpt")
_MAX_LISTED = 20
_OPEN_ATTEMPTS = 6


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """What a load found.

    Args:
        directory: the checkpoint's real path.
        step: the update that it was saved at, if it says.
        metrics: as saved.
        metadata: as saved.
        world_size: ranks that saved it.
        differences: what did not fit and was left out (`strict=False` only).
        unread: names that the checkpoint holds and that were not asked for.
    """

    directory: Path
    step: int | None
    metrics: Mapping[str, float]
    metadata: Any
    world_size: int
    differences: tuple[str, ...]
    unread: tuple[str, ...]


@dataclass(frozen=True)
class _Opened:
    directory: Path
    manifest: Manifest
    trees: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Stored]]
    generators: Any  # this rank's; None if it has none there


@dataclass(frozen=True)
class _Fit:
    lines: list[str]
    loads: list[Callable[[], None]]


def load_checkpoint(
    directory: str | os.PathLike[str],
    objects: Mapping[str, Any],
    *,
    strict: bool = True,
    codecs: Sequence[Codec] = (),
    rng: bool = True,
    before_load: Callable[[Path], Collection[str]] | None = None,
) -> LoadedCheckpoint:
    """Load objects in place from one checkpoint, saved on any number of ranks. All ranks call it.

    Everything is verified (sizes, checksums), decoded and compared before the first object changes. Models keep their
    parameters, which are written over; optimizers and the rest take copies. Nothing is unpickled.

    Args:
        directory: a committed checkpoint.
        objects: name -> object, named as when saved. What else the checkpoint holds is left unread.
        strict: raise on any difference; if False, load what fits, warn and list the rest in the result.
        codecs: those it was saved with.
        rng: restore this rank's random generators; a rank that has none saved is seeded from (seed, rank).
        before_load: called on every rank with the checkpoint's directory once it is verified; returns the names of
            models to leave as they are, loaded by the callback or not at all.

    Raises:
        CheckpointNotFoundError: no committed checkpoint there; says what is there instead.
        CheckpointCorruptError: a file is missing, truncated or altered; names it.
        CheckpointMismatchError: the objects do not fit; lists the differences. Nothing was changed.
        CheckpointError: an object refused its state; those before it are loaded, so load again or start anew.

    Cost: reads the state once to verify and once, from memory, to copy; two object gathers of a few hundred bytes.
    """
    world, path = current_world(), real_directory(directory)
    doing = f"loading {path}"
    opened: _Opened | None = None
    fit, left_out = _Fit([], []), set[str]()

    def prepare() -> list[str]:
        nonlocal opened, fit
        check_objects(objects)
        opened = _open_settled(path, world, objects)
        if before_load is not None:
            left_out.update(before_load(path))
            check_models(objects, left_out)
        fit = _compare(opened, objects, left_out, codecs)
        if strict and fit.lines:
            raise CheckpointMismatchError(f"{path} does not fit: {_listed(fit.lines)}. strict=False loads what fits.")
        return fit.lines

    def apply() -> None:
        assert opened is not None
        for load in fit.loads:
            load()
        if rng:
            _restore_rng(opened, world)

    from_main(world, doing, lambda: require_checkpoint(path))
    differences = tuple(dict.fromkeys(line for lines in together(world, doing, prepare) for line in lines))
    together(world, doing, apply)
    assert opened is not None
    unread = tuple(name for name in opened.manifest.objects if name not in objects)
    if world.is_main:
        if differences:
            warn_user(f"{path} does not fit wholly; left out: {_listed(differences)}", RuntimeWarning)
        if unread:
            logger.info("%s also holds %s, left unread", path, ", ".join(unread))
    return LoadedCheckpoint(
        directory=path,
        step=opened.manifest.step,
        metrics=opened.manifest.metrics,
        metadata=decode(opened.manifest.metadata, {}, codecs, where="metadata"),
        world_size=opened.manifest.world_size,
        differences=differences,
        unread=unread,
    )


def _listed(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _MAX_LISTED} more" if len(lines) > _MAX_LISTED else ""
    return "; ".join(lines[:_MAX_LISTED]) + more


# ---------------------------------------------------------------- finding


def require_checkpoint(directory: Path) -> Path:
    """The manifest in force in a directory.

    Raises:
        CheckpointNotFoundError: there is none; says what is there instead.
        CheckpointCorruptError: the rest of a checkpoint is there, but not its manifest.
    """
    if not directory.exists():
        raise CheckpointNotFoundError(f"there is no {directory}; pass the directory of a committed checkpoint.")
    if not directory.is_dir():
        raise CheckpointNotFoundError(f"{directory} is a file; a checkpoint is a directory with a {MANIFEST_NAME}.")
    if STAGING_MARK in directory.name:
        raise CheckpointNotFoundError(
            f"{directory} is being written, or was left by a save that died; it is no checkpoint."
        )
    if found := manifest_path(directory):
        return found
    names = sorted(path.name for path in directory.iterdir())
    if STATE_NAME in names:
        raise CheckpointCorruptError(f"{directory / MANIFEST_NAME} is missing, so nothing tells what belongs to it.")
    inner = [name for name in names if (directory / name / MANIFEST_NAME).is_file()]
    hint = f" It holds checkpoints: {', '.join(inner[-3:])}; pass one of them." if inner else ""
    shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nothing"
    raise CheckpointNotFoundError(
        f"{directory} is not a checkpoint of accel: no {MANIFEST_NAME}. Found: {shown}.{hint}"
    )


def is_committed_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a checkpoint that this package has committed; looks for its manifest, no further."""
    return manifest_path(real_directory(directory)) is not None


def verify_checkpoint(directory: str | os.PathLike[str]) -> Manifest:
    """Check that every file of a checkpoint is there, of its size, and unaltered. Changes nothing, needs no rank.

    Raises:
        CheckpointNotFoundError: no committed checkpoint there.
        CheckpointCorruptError: names every file that is missing, truncated or altered, and how.

    Cost: reads all files once.
    """
    return _verify(real_directory(directory), part=0, parts=1)


def _verify(path: Path, *, part: int, parts: int) -> Manifest:
    """The same for one of several processes that share the checksums, each file's by one of them."""
    manifest = read_manifest(require_checkpoint(path))
    largest_first = sorted(manifest.files, key=lambda name: -manifest.files[name].size_bytes)
    left_to_others = {name for i, name in enumerate(largest_first) if i % parts != part}
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = list(
            pool.map(
                lambda item: _problem(path, item[0], item[1], sizes_only=item[0] in left_to_others),
                manifest.files.items(),
            )
        )
    if problems := [problem for problem in found if problem]:
        raise CheckpointCorruptError(f"{path} is damaged: {'; '.join(problems)}")
    return manifest


def _problem(directory: Path, name: str, entry: FileEntry, *, sizes_only: bool) -> str | None:
    path = data_path(directory, name)
    try:
        if not Path(os.path.realpath(path)).is_relative_to(directory) or path.is_symlink():
            return f"{name} is a link out of the checkpoint"
        size_bytes = path.stat().st_size
        if size_bytes != entry.size_bytes:
            return f"{name} has {size_bytes} bytes, saved were {entry.size_bytes}"
        if not sizes_only and (digest := hash_file(path).xxh3_128) != entry.xxh3_128:
            return f"{name} was altered (checksum {digest}, saved was {entry.xxh3_128})"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {os_reason(error)}"
    return None


def _open_settled(path: Path, world: World, objects: Mapping[str, Any]) -> _Opened:
    """Open and verify; anew if another process replaces the checkpoint or moves its files meanwhile."""
    last: Exception | None = None
    for attempt in range(_OPEN_ATTEMPTS):
        time.sleep(0.05 * attempt)
        before, was_moving = _identity(path), (path / JOURNAL_NAME).is_dir()
        try:
            manifest = _verify(path, part=world.local_rank, parts=world.local_size)
            opened = _open(path, manifest, objects, rng_file(world.rank))
            if before and _identity(path) == before:  # what was opened stays what it is: all of it is one set
                return opened
            last = None
        except (CheckpointCorruptError, OSError) as error:
            last = error if _identity(path) == before else None
            if last is not None and not was_moving and not (path / JOURNAL_NAME).is_dir():
                raise
    raise last or CheckpointError(f"{path} is being replaced again and again; load it when its writer is done.")


def _identity(path: Path) -> bytes | None:
    found = manifest_path(path)
    try:
        return found.read_bytes() if found else None
    except FileNotFoundError:
        return None  # it moves just now


def _open(path: Path, manifest: Manifest, objects: Mapping[str, Any], generators: str) -> _Opened:
    state = data_path(path, STATE_NAME)
    if STATE_NAME not in manifest.files:
        raise CheckpointCorruptError(f"{path} has no {STATE_NAME}")
    trees = load_json(read_json_bytes(state), str(state))
    if not isinstance(trees, dict) or trees.keys() != manifest.objects.keys():
        raise CheckpointCorruptError(f"{state} does not hold the objects that the manifest lists")
    tensors = open_tensors(path, manifest, [name for name in objects if name in manifest.objects])
    if generators not in manifest.files:
        return _Opened(path, manifest, trees, tensors, None)
    file = data_path(path, generators)
    state = decode(load_json(read_json_bytes(file), str(file)), {}, where=str(file))
    return _Opened(path, manifest, trees, tensors, state)


# ---------------------------------------------------------------- comparing and loading


def _compare(opened: _Opened, objects: Mapping[str, Any], left_out: Collection[str], codecs: Sequence[Codec]) -> _Fit:
    """What does not fit, in words, and what to call to load the rest, in the order of the objects."""
    fit = _Fit([], [])
    names, in_parts = parameter_names(objects), names_in_parts(objects)
    for name, value in objects.items():
        entry = opened.manifest.objects.get(name)
        if name in left_out:
            continue  # its parameters' names still serve the optimizers
        if entry is None:
            held = ", ".join(f"{other} ({e.type})" for other, e in opened.manifest.objects.items()) or "nothing"
            fit.lines.append(f"{name}: not in the checkpoint, which holds {held}")
        elif (kind := kind_of(value)) != entry.kind:
            fit.lines.append(f"{name}: a {entry.kind} ({entry.type}) in the checkpoint, a {kind} here")
        else:
            _compare_one(fit, opened, name, value, names, in_parts, codecs)
    return fit


def _compare_one(
    fit: _Fit,
    opened: _Opened,
    name: str,
    value: Any,
    names: Mapping[int, str],
    in_parts: Sequence[str] | None,
    codecs: Sequence[Codec],
) -> None:
    entry, tree, tensors = opened.manifest.objects[name], opened.trees[name], opened.tensors[name]
    _check_readable(name, entry, tree, tensors, codecs)
    unfit: set[str] = set()
    if entry.kind == "model":
        lines, unfit = compare_model(name, value, entry, tree, tensors)
        fit.loads.append(lambda: load_model(name, value, entry, tree, tensors, codecs, unfit))
    elif entry.kind == "optimizer":
        lines, unfit = compare_optimizer(name, value, entry, tree, names, in_parts)
        fit.loads.append(lambda: load_optimizer(name, value, tree, tensors, names, codecs, unfit))
    elif not (lines := compare_stateful(name, value, entry)):
        fit.loads.append(lambda: load_stateful(name, value, tree, tensors, codecs))
    fit.lines.extend(lines)


def _check_readable(
    name: str, entry: ObjectEntry, tree: Any, tensors: Mapping[str, Stored], codecs: Sequence[Codec]
) -> None:
    """Decode an object's JSON part, without an optimizer's tensors, so that damage is found before anything changes."""
    if entry.kind == "optimizer":
        try:
            values = [value for fields in tree["state"].values() for value in fields.values()]
            tree = [*(value for value in values if not is_reference(value, tensors)), tree["groups"], tree["rest"]]
        except (LookupError, TypeError, AttributeError) as error:
            raise CheckpointCorruptError(f"{name} has not the form of an optimizer's state: {error!r}") from error
    decode(tree, Wholes(tensors), codecs, where=name, copy=False)


def _restore_rng(opened: _Opened, world: World) -> None:
    """This rank's generators as saved; else seeded by the rule (seed, rank); else left, with a warning.

    The run's seed is set first, so that it is known again and the next checkpoint records it too.
    """
    from accel_state import capture_rng_state, restore_rng_state, seed_for_rank, set_seed

    state, manifest = opened.generators, opened.manifest
    if state is None and rng_file(0) in manifest.files and manifest.seed is not None:
        set_seed(seed_for_rank(manifest.seed, world.rank))
        state = capture_rng_state()
    if state is None:
        reason = "was saved with rng=False"
        if rng_file(0) in manifest.files:
            reason = f"was saved on {manifest.world_size} rank(s) and records no seed (call set_seed before saving)"
        warn_user(
            f"{opened.directory} {reason}: the random generators of rank {world.rank} go on as they are.",
            RuntimeWarning,
        )
        return
    if manifest.seed is not None:
        set_seed(manifest.seed)
    restore_rng_state(state)
