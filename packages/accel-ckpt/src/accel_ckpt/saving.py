"""Saving: capture on every rank, stage, write, agree, commit; at once or in the background."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from accel_state.errors import CheckpointError

from .buffers import CopyBuffers
from .codec import Codec
from .commit import commit
from .crew import collect, enlist, report
from .durable import FileEntry, flush_file, hash_file, os_reason, write_file
from .manifest import check_file_name, dump_manifest
from .names import MANIFEST_NAME, OWNER_NAME
from .owner import Claim
from .ranks import reason_of, together
from .snapshot import Contents, manifest_entries, write_generators, write_snapshot
from .started import BeforeWrite, Save, begin
from .tensors import write_tensor_files

logger = logging.getLogger("accel_ckpt")


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
    save_on_each_node: bool = False,
) -> Path:
    """Save objects into a directory, wholly or not at all. All ranks call it, with the same arguments.

    Args:
        directory: becomes the checkpoint. If it exists, the checkpoint in it is replaced at one instant for readers of
            accel; other files in it stay. Foreign readers are only safe with a new directory.
        objects: name -> model, optimizer, or anything with state_dict and load_state_dict. Equal on all ranks but for
            their generators, and for models in parts (`accel_state.protocols.Parted`), whose optimizers are saved
            with them. The names are what loading goes by.
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
        save_on_each_node: one process of each node writes a whole checkpoint, for file systems that nodes do not share.
            What is sharded over nodes cannot be saved so.

    Returns:
        The real path of the committed checkpoint.

    Raises:
        CheckpointError: on all ranks, naming what failed where; nothing was committed and what was staged is gone. With
            `save_on_each_node` other nodes than the one that failed may have committed.

    Cost: writes the state once and flushes it to the disk; three object gathers of a few hundred bytes per rank, and of
    about 100 bytes more per sharded tensor, 500 per tensor of an object in parts; with `save_on_each_node` of each
    rank's generators, about 20 KB.
    """
    contents = Contents(objects=objects, step=step, metrics=metrics, metadata=metadata, codecs=codecs, rng=rng)
    save = begin(directory, contents, before_write, save_on_each_node)
    world = save.world

    def write() -> dict[str, FileEntry]:
        save.check_alone()
        return write_snapshot(save.path, save.snapshot, save.tensors, with_state=save.is_main)

    try:
        parts = together(world, save.doing, write)
        _call_hook(save, before_commit)
        files = save.merged(parts)
        together(world, save.doing, lambda: _seal(save, files) if save.is_main else None)
    except BaseException:
        save.discard()
        raise
    return save.target


class SaveHandle:
    """A save that goes on in the background; `wait` on all ranks to know that it is committed.

    Args:
        directory: the real path of the checkpoint to be.
    """

    def __init__(self, directory: Path, save: Save, thread: threading.Thread | None, failure: list[Exception]) -> None:
        self.directory = directory
        self._save, self._thread, self._failure = save, thread, failure

    def done(self) -> bool:
        """Whether the background work has ended, well or not. No communication."""
        mine = self._thread is None or not self._thread.is_alive()
        return mine and (self._save.is_main or not self._save.path.exists())

    def wait(self) -> Path:
        """Wait for the commit. All ranks call it; it may be called again.

        Raises:
            CheckpointError: on all ranks: nothing was committed and what was staged is gone.

        Cost: one object gather.
        """
        return together(self._save.world, self._save.doing, self._result)[self._save.world.rank]

    def _result(self) -> Path:
        if self._thread is not None:
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
    save_on_each_node: bool = False,
) -> SaveHandle:
    """Like `save_checkpoint`, but returns as soon as a private copy of the state exists.

    The writing, flushing and committing go on in a thread of rank 0, and of the ranks that write parts of sharded
    tensors; they tell rank 0 by files in the staging directory, and no collective is called. The process does not exit
    before they are done. A failure is logged at once and raised by `SaveHandle.wait`.

    Args:
        buffers: memory for the copy; pass the same again, once the save before is done, to save its allocation.
        on_commit: called in the background after the commit, on rank 0, or on one process of each node.
        save_on_each_node: see `save_checkpoint`.

    Raises:
        CheckpointError: on all ranks, for what fails before the copy exists.

    Cost: one more copy in memory, on each rank of what it writes; two object gathers.
    """
    contents = Contents(objects=objects, step=step, metrics=metrics, metadata=metadata, codecs=codecs, rng=rng)
    save = begin(directory, contents, before_write, save_on_each_node)
    world, failure = save.world, list[Exception]()
    copies: dict[str, dict[str, Tensor]] = {}
    lock: Claim | None = None

    def copy() -> dict[str, FileEntry]:
        nonlocal copies, lock
        save.check_alone()
        copies = (buffers or CopyBuffers()).private(save.tensors)
        if save.is_main:
            return {}
        lock = enlist(save.path, world.rank) if copies else None
        return write_generators(save.path, save.snapshot)

    try:
        files = save.merged(together(world, save.doing, copy))
        _call_hook(save, before_commit)
    except BaseException:
        if lock is not None:
            lock.release()
        save.discard()
        raise
    work: Callable[[], None] | None = None
    if save.is_main:
        work = partial(_finish, save, files, copies, on_commit, failure)
    elif lock is not None:
        work = partial(_contribute, save, copies, lock, failure)
    thread = threading.Thread(target=work, name="accel-ckpt-save") if work else None
    if thread is not None:
        thread.start()
    return SaveHandle(save.target, save, thread, failure)


def _contribute(save: Save, copies: Mapping[str, Mapping[str, Tensor]], lock: Claim, failure: list[Exception]) -> None:
    """Write this rank's part in the background and report to rank 0."""
    written: dict[str, FileEntry] = {}
    try:
        written = write_tensor_files(save.path, copies)
    except Exception as error:  # noqa: BLE001 - reported, and raised by wait()
        failure.append(error)
    try:
        report(save.path, save.world.rank, written, [reason_of(error) for error in failure], lock)
    except OSError as error:  # then rank 0 finds the lock free without a report
        failure.append(error)


def _finish(
    save: Save,
    files: Mapping[str, FileEntry],
    copies: Mapping[str, Mapping[str, Tensor]],
    on_commit: Callable[[], None] | None,
    failure: list[Exception],
) -> None:
    """Write this rank's part in the background, wait for the others' and commit."""
    own: dict[str, FileEntry] = {}
    try:
        try:
            own = write_snapshot(save.path, save.snapshot, copies, with_state=True)
        finally:  # nothing is removed while another rank writes
            others = collect(save.path, sorted(save.plan.writers.keys() - {save.world.rank}))
        _seal(save, {**files, **others, **own})
    except Exception as error:  # noqa: BLE001 - raised by wait()
        logger.error("%s in the background failed: %s", save.doing, error)
        save.discard()
        failure.append(error)
        return
    try:
        if on_commit is not None:
            on_commit()
    except Exception as error:  # noqa: BLE001 - raised by wait()
        failure.append(error)


def _call_hook(save: Save, hook: Callable[[Path], None] | None) -> None:
    if hook is not None:
        together(save.world, save.doing, lambda: hook(save.path))


def _seal(save: Save, files: Mapping[str, FileEntry]) -> None:
    """Write the manifest over all files that are there, and commit."""
    staging = save.staging
    assert staging is not None
    everything = {**files, **_files_of_hooks(staging.path, files)}
    if lost := sorted(name for name in everything if not (staging.path / name).is_file()):
        raise CheckpointError(
            f"written by a rank but not seen by rank {save.world.rank}: {', '.join(lost)}. All ranks need one file "
            "system; where only those of a node share one, save with save_on_each_node=True."
        )
    manifest = replace(save.snapshot.manifest, files=everything, objects=manifest_entries(save.snapshot, save.plan))
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
