"""Saving: capture on every rank, stage, write, agree, commit; at once or in the background."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_state.errors import CheckpointError

from .codec import Codec
from .commit import Staging, commit, discard, open_staging, real_directory
from .durable import FileEntry, flush_file, hash_file, os_reason, write_file
from .manifest import check_file_name, dump_manifest
from .names import MANIFEST_NAME, OWNER_NAME
from .ranks import World, current_world, from_main, together
from .snapshot import CopyBuffers, Snapshot, manifest_entries, take_snapshot, write_snapshot

logger = logging.getLogger("accel_ckpt")
BeforeWrite = Callable[[Path], Mapping[str, Mapping[str, Any] | None]]


@dataclass(frozen=True, kw_only=True)
class _Save:
    world: World
    doing: str
    target: Path
    path: Path
    snapshot: Snapshot
    staging: Staging | None  # on rank 0


def save_checkpoint(
    directory: str | os.PathLike[str],
    objects: Mapping[str, Any],
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    metadata: Any = None,
    codecs: Sequence[Codec] = (),
    rng: bool = True,
    before_write: BeforeWrite | None = None,
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
        before_write: called on every rank with the directory being filled, before any state is read; what it writes
            there belongs to the checkpoint. Returns model's name -> weights to write in place of the model's own, None
            to leave the model out. Rank 0's answer counts.
        before_commit: called on every rank with the directory when all else is written; what it writes there belongs
            to the checkpoint too.

    Returns:
        The real path of the committed checkpoint.

    Raises:
        CheckpointError: on all ranks, naming what failed where; nothing was committed and what was staged is gone.

    Cost: writes the state once and flushes it to the disk; three object gathers of a few hundred bytes per rank.
    """
    save = _begin(directory, objects, step, metrics, metadata, codecs, rng, None, before_write)
    try:
        files = _write(save, main=True)
        _call_hook(save, before_commit)
        from_main(save.world, save.doing, lambda: _seal(save, files))
    except BaseException:
        _discard(save)
        raise
    return save.target


class SaveHandle:
    """A save that goes on in the background; `wait` on all ranks to know that it is committed.

    Args:
        directory: the real path of the checkpoint to be.
    """

    def __init__(self, directory: Path, save: _Save, thread: threading.Thread | None, failure: list[Exception]) -> None:
        self.directory = directory
        self._save, self._thread, self._failure = save, thread, failure

    def done(self) -> bool:
        """Whether the background work has ended, well or not. No communication."""
        return not self._thread.is_alive() if self._thread else not self._save.path.exists()

    def wait(self) -> Path:
        """Wait for the commit. All ranks call it; it may be called again.

        Raises:
            CheckpointError: on all ranks: nothing was committed and what was staged is gone.

        Cost: one object gather.
        """
        return from_main(self._save.world, self._save.doing, self._result)

    def _result(self) -> Path:
        assert self._thread is not None
        self._thread.join()
        if self._failure:
            raise self._failure[0]
        return self.directory


def save_in_background(
    directory: str | os.PathLike[str],
    objects: Mapping[str, Any],
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    metadata: Any = None,
    codecs: Sequence[Codec] = (),
    rng: bool = True,
    before_write: BeforeWrite | None = None,
    before_commit: Callable[[Path], None] | None = None,
    buffers: CopyBuffers | None = None,
    on_commit: Callable[[], None] | None = None,
) -> SaveHandle:
    """Like `save_checkpoint`, but returns as soon as a private copy of the state exists.

    The writing, flushing and committing go on in a thread of rank 0, which communicates with no one. The process does
    not exit before it is done. A failure is logged at once and raised by `SaveHandle.wait`.

    Args:
        buffers: memory for the copy; pass the same again, once the save before is done, to save its allocation.
        on_commit: called on rank 0 in the background after the commit.

    Raises:
        CheckpointError: on all ranks, for what fails before the copy exists.

    Cost: one more copy of the state in rank 0's memory; two object gathers.
    """
    save = _begin(directory, objects, step, metrics, metadata, codecs, rng, buffers or CopyBuffers(), before_write)
    failure: list[Exception] = []
    try:
        files = _write(save, main=False)
        _call_hook(save, before_commit)
    except BaseException:
        _discard(save)
        raise

    def finish() -> None:
        try:
            _seal(save, {**files, **write_snapshot(save.path, save.world, save.snapshot)})
        except Exception as error:  # noqa: BLE001 - raised by wait()
            logger.error("%s in the background failed: %s", save.doing, error)
            _discard(save)
            failure.append(error)
            return
        try:
            if on_commit is not None:
                on_commit()
        except Exception as error:  # noqa: BLE001 - raised by wait()
            failure.append(error)

    thread = threading.Thread(target=finish, name="accel-ckpt-save") if save.world.is_main else None
    if thread is not None:
        thread.start()
    return SaveHandle(save.target, save, thread, failure)


def _begin(
    directory: str | os.PathLike[str],
    objects: Mapping[str, Any],
    step: int | None,
    metrics: Mapping[str, float] | None,
    metadata: Any,
    codecs: Sequence[Codec],
    rng: bool,
    buffers: CopyBuffers | None,
    before_write: BeforeWrite | None,
) -> _Save:
    """Capture on every rank, copy if asked to, and make the staging directory; with a callback, that first."""
    world, target = current_world(), real_directory(directory)
    doing = f"saving to {target}"
    snapshot: Snapshot | None = None
    staging: Staging | None = None

    def stage() -> str:
        nonlocal staging
        if not world.is_main:
            return ""
        staging = open_staging(target)
        return str(staging.path)

    def capture(instead: Mapping[str, Mapping[str, Any] | None]) -> None:
        nonlocal snapshot
        snapshot = take_snapshot(world, objects, step, metrics, metadata, codecs, rng, instead)

    def copy() -> None:
        nonlocal snapshot
        if buffers is not None and world.is_main:
            assert snapshot is not None
            snapshot = buffers.private(snapshot)

    def at_once() -> str:
        capture({})
        path = stage()
        copy()
        return path

    def after(callback: BeforeWrite, path: Path) -> None:
        capture(callback(path))
        copy()

    try:
        begin = at_once if before_write is None else stage
        said = together(world, doing, lambda: (str(target), begin()))
        if differing := [f"rank {rank}: {named}" for rank, (named, _) in enumerate(said) if named != said[0][0]]:
            raise CheckpointError(
                f"the ranks name different directories (rank 0: {said[0][0]}; {'; '.join(differing[:4])}): pass the "
                "same one everywhere; the main process writes"
            )
        path = Path(said[0][1])
        if before_write is not None:
            together(world, doing, lambda: after(before_write, path))
    except BaseException:
        if staging is not None:
            discard(staging)
        raise
    assert snapshot is not None
    return _Save(world=world, doing=doing, target=target, path=path, snapshot=snapshot, staging=staging)


def _write(save: _Save, *, main: bool) -> dict[str, FileEntry]:
    """Write the ranks' files, rank 0's only if `main`; the entries of all that were written."""

    def write() -> dict[str, FileEntry]:
        return write_snapshot(save.path, save.world, save.snapshot) if main or not save.world.is_main else {}

    return {name: entry for own in together(save.world, save.doing, write) for name, entry in own.items()}


def _call_hook(save: _Save, hook: Callable[[Path], None] | None) -> None:
    if hook is not None:
        together(save.world, save.doing, lambda: hook(save.path))


def _discard(save: _Save) -> None:
    if save.staging is not None:
        discard(save.staging)


def _seal(save: _Save, files: Mapping[str, FileEntry]) -> None:
    """Write the manifest over all files that are there, and commit."""
    staging = save.staging
    assert staging is not None
    everything = {**files, **_files_of_hooks(staging.path, files)}
    if lost := sorted(name for name in everything if not (staging.path / name).is_file()):
        raise CheckpointError(
            f"written by a rank but not seen by rank 0: {', '.join(lost)}. All ranks need one file system."
        )
    manifest = replace(save.snapshot.manifest, files=everything, objects=manifest_entries(save.snapshot))
    try:
        write_file(staging.path / MANIFEST_NAME, [dump_manifest(manifest)])
        commit(staging, everything)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot commit {staging.target}: {os_reason(error)}") from error


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
