"""A directory of checkpoints: save, find the newest that is whole, keep the ones that matter."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_state import warn_user
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

from .buffers import CopyBuffers
from .codec import Codec
from .commit import real_directory, remove_checkpoint
from .loading import load_checkpoint
from .manifest import manifest_path, read_manifest
from .ranks import current_world, from_main
from .retention import CheckpointInfo, Keep
from .saving import BeforeWrite, SaveHandle, save_checkpoint, save_in_background


class Checkpointer:
    """Checkpoints of one run, each in a new directory `<prefix><number>`.

    All ranks make one and call its methods alike.

    Args:
        directory: where they lie; made by the first save. Other files in it are left alone.
        keep: which to keep once a new one is committed (`latest(3) | best("loss")`); None keeps all. The newest is
            always kept.
        codecs: for types that states hold beyond numbers, strings, lists, dicts and tensors.
        prefix: of the directories' names.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: Keep | None = None,
        *,
        codecs: Sequence[Codec] = (),
        prefix: str = "step-",
    ) -> None:
        self.directory = real_directory(directory)
        self.keep = keep
        self.codecs = tuple(codecs)
        self.prefix = prefix
        self._pending: SaveHandle | None = None
        self._buffers = CopyBuffers()

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Any = None,
        blocking: bool = True,
        before_write: BeforeWrite | None = None,
        before_commit: Callable[[Path], None] | None = None,
        **objects: Any,
    ) -> Path | SaveHandle:
        """Save objects under names, wholly or not at all; then prune by the retention rule.

        Saving a step again makes another directory, which takes the first one's place.

        Args:
            step: the number of updates made; orders the checkpoints, so it may not be below one that is there.
            metrics: numbers that the retention rule may compare.
            metadata: plain values to get back.
            blocking: return once the checkpoint is committed; if False, once a private copy of the state exists. One
                such save is in flight at most: the next save or restore waits for it, and raises what it failed with.
            before_write, before_commit: see `save_checkpoint`.
            objects: see `save_checkpoint`; named otherwise than these arguments.

        Returns:
            The committed directory, or a handle to wait for it.

        Raises:
            CheckpointError: on all ranks; the checkpoints that were there are intact.
        """
        self.wait()
        if self.keep and (missing := sorted(self.keep.metrics - (metrics or {}).keys())):
            raise CheckpointError(
                f"keep={self.keep!r} compares {', '.join(missing)}: pass metrics={{{missing[0]!r}: …}}."
            )
        world = current_world()
        target = from_main(world, f"saving to {self.directory}", lambda: self._new_directory(step))
        if blocking:
            path = save_checkpoint(
                target,
                objects,
                step=step,
                metrics=metrics,
                metadata=metadata,
                codecs=self.codecs,
                before_write=before_write,
                before_commit=before_commit,
            )
            if world.is_main:
                self._prune()
            return path
        self._pending = save_in_background(
            target,
            objects,
            step=step,
            metrics=metrics,
            metadata=metadata,
            codecs=self.codecs,
            before_write=before_write,
            before_commit=before_commit,
            buffers=self._buffers,
            on_commit=self._prune,
        )
        return self._pending

    def wait(self) -> None:
        """Wait for the save in flight, if there is one. All ranks call it.

        Raises:
            CheckpointError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def restore(
        self,
        *,
        step: int | None = None,
        strict: bool = True,
        before_load: Callable[[Path], Collection[str]] | None = None,
        **objects: Any,
    ) -> int:
        """Load the newest checkpoint that is whole, or that of a step.

        A damaged one is passed over with a warning that says what is wrong with it.

        Args:
            step: load this one, and fail if it is damaged.
            strict, before_load: see `load_checkpoint`.
            objects: named as when saved.

        Returns:
            The step that it was saved at.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointCorruptError: none is whole.
            CheckpointMismatchError: the newest whole one does not fit; older ones are not tried.
        """
        self.wait()
        world = current_world()
        paths = from_main(world, f"loading from {self.directory}", lambda: self._candidates(step))
        problems = []
        for path in reversed(paths):
            try:
                loaded = load_checkpoint(path, objects, strict=strict, codecs=self.codecs, before_load=before_load)
            except CheckpointCorruptError as error:
                problems.append(str(error))
                if path != paths[0] and world.is_main:
                    warn_user(f"falling back to the checkpoint before: {error}", RuntimeWarning)
                continue
            return _step_of(path) if loaded.step is None else loaded.step
        raise CheckpointCorruptError(f"no checkpoint in {self.directory} is whole: {'; '.join(problems)}")

    def latest(self) -> CheckpointInfo | None:
        """The newest committed checkpoint, or None."""
        return next(iter(reversed(self.all())), None)

    def all(self) -> list[CheckpointInfo]:
        """The committed checkpoints with a readable manifest, oldest step first; the last one of each step."""
        by_step = {info.step: info for info in list_checkpoints(self.directory, self.prefix)}
        return list(by_step.values())

    def _candidates(self, step: int | None) -> list[Path]:
        paths = [path for path in _directories(self.directory, self.prefix) if step is None or _step_of(path) == step]
        if not paths:
            what = "no committed checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointNotFoundError(f"there is {what} in {self.directory}.")
        return paths if step is None else paths[-1:]

    def _new_directory(self, step: int) -> Path:
        if type(step) is not int or step < 0:
            raise CheckpointError(f"step={step!r} is not a count of updates; give an int of at least 0.")
        newest = max(map(_step_of, _directories(self.directory, self.prefix)), default=step)
        if step < newest:
            raise CheckpointError(
                f"step={step} is below {self.prefix}{newest} in {self.directory}: restore() would go on loading that "
                "one, and retention would remove the new one. To go on from an older step, remove the newer "
                "checkpoints first, or use another directory."
            )
        base = target = self.directory / f"{self.prefix}{step}"
        attempt = 1
        while os.path.lexists(target):
            attempt += 1
            target = base.with_name(f"{base.name}.{attempt}")
        return target

    def superseded(self) -> list[Path]:
        """The checkpoints that the retention rule does not keep, and all but the last save of each step."""
        if self.keep is None:
            return []
        infos = self.all()
        kept = {info.path for info in [*self.keep.choose(infos), *infos[-1:]]}
        return [info.path for info in list_checkpoints(self.directory, self.prefix) if info.path not in kept]

    def _prune(self) -> None:
        for path in self.superseded():
            try:
                remove_checkpoint(path)
            except (OSError, CheckpointError) as error:
                warn_user(f"cannot remove {path}: {error}", RuntimeWarning)


def list_checkpoints(directory: str | os.PathLike[str], prefix: str) -> list[CheckpointInfo]:
    """The committed checkpoints `<prefix><number>` in a directory, by number; those of which the manifest can be read.

    Costs a manifest's read per checkpoint.
    """
    infos = []
    for path in _directories(Path(directory), prefix):
        found = manifest_path(path)
        try:
            manifest = read_manifest(found) if found else None
        except CheckpointCorruptError:
            continue  # `restore` says what is wrong with it when it gets there; nothing of ours removes it
        if manifest is not None:
            step = _step_of(path) if manifest.step is None else manifest.step
            infos.append(
                CheckpointInfo(
                    path=path, step=step, metrics=dict(manifest.metrics), created_unix_s=manifest.created_unix_s
                )
            )
    return infos


def _directories(directory: Path, prefix: str) -> list[Path]:
    """`<prefix><number>`, and `<prefix><number>.<n>` for the n-th save of a number; oldest first."""
    pattern = re.compile(rf"{re.escape(prefix)}(\d+)(?:\.(\d+))?")
    if not directory.is_dir():
        return []
    found = [
        (int(match[1]), int(match[2] or 1), path)
        for path in directory.iterdir()
        if (match := pattern.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, _, path in sorted(found)]


def _step_of(path: Path) -> int:
    return int(re.search(r"(\d+)(?:\.\d+)?$", path.name)[1])  # type: ignore[index] # by _directories
