"""A directory of checkpoints: save, find the newest that is whole, keep the ones that matter."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from accel_state import warn_user
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

from .buffers import CopyBuffers
from .codec import Codec
from .commit import real_directory, remove_checkpoint
from .loading import load_checkpoint
from .manifest import manifest_path, read_manifest
from .ranks import World, current_world, together
from .retention import CheckpointInfo, Keep
from .saving import SaveHandle, save_checkpoint, save_in_background
from .started import BeforeWrite

T = TypeVar("T")


class Checkpointer:
    """Checkpoints of one run, each in a new directory `<prefix><number>`.

    All ranks make one and call its methods alike.

    Args:
        directory: where they lie; made by the first save. Other files in it are left alone.
        keep: which to keep once a new one is committed (`latest(3) | best("loss")`); None keeps all. The newest is
            always kept.
        codecs: for types that states hold beyond numbers, strings, lists, dicts and tensors.
        prefix: of the directories' names.
        save_on_each_node: one process of each node writes whole checkpoints, for file systems that nodes do not share;
            the newest is then the newest that every node has.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: Keep | None = None,
        *,
        codecs: Sequence[Codec] = (),
        prefix: str = "step-",
        save_on_each_node: bool = False,
    ) -> None:
        self.directory = real_directory(directory)
        self.keep = keep
        self.codecs = tuple(codecs)
        self.prefix = prefix
        self.save_on_each_node = save_on_each_node
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
        target = self._new_directory(world, step)
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
                save_on_each_node=self.save_on_each_node,
            )
            if world.commits(self.save_on_each_node):
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
            save_on_each_node=self.save_on_each_node,
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

        def load(path: Path) -> int:
            loaded = load_checkpoint(path, objects, strict=strict, codecs=self.codecs, before_load=before_load)
            return _step_of(path) if loaded.step is None else loaded.step

        return self.load_newest(load, step=step)

    def load_newest(self, load: Callable[[Path], T], *, step: int | None = None) -> T:
        """Call a function with the newest checkpoint, and with the one before where that one is damaged.

        Args:
            load: gets a directory `<prefix><number>`, be it a checkpoint or not; raises CheckpointCorruptError or
                CheckpointNotFoundError, on all ranks, for one to pass over.
            step: call it with this one only.

        Returns:
            What the function returns.

        Raises:
            CheckpointNotFoundError: there is no such directory.
            CheckpointCorruptError: the function could load none; says why.
        """
        self.wait()
        world = current_world()
        paths = self._candidates(world, step)
        problems: list[CheckpointError] = []
        for path in paths:
            try:
                return load(path)
            except (CheckpointCorruptError, CheckpointNotFoundError) as error:
                problems.append(error)
                if path != paths[-1] and world.is_main:
                    warn_user(f"falling back to the checkpoint before: {error}", RuntimeWarning)
        if all(isinstance(problem, CheckpointNotFoundError) for problem in problems):
            raise problems[0]
        raise CheckpointCorruptError(f"no checkpoint in {self.directory} is whole: {'; '.join(map(str, problems))}")

    def latest(self) -> CheckpointInfo | None:
        """The newest committed checkpoint, or None."""
        return next(iter(reversed(self.all())), None)

    def all(self) -> list[CheckpointInfo]:
        """The committed checkpoints with a readable manifest, oldest step first; the last one of each step."""
        by_step = {info.step: info for info in list_checkpoints(self.directory, self.prefix)}
        return list(by_step.values())

    def _candidates(self, world: World, step: int | None) -> list[Path]:
        """What may be a checkpoint, newest first: as rank 0 sees it, or on every node."""
        doing = f"loading from {self.directory}"
        listed = together(world, doing, lambda: self._names(step) if world.commits(self.save_on_each_node) else None)
        of_nodes = [names for names in listed if names is not None]
        everywhere = [name for name in of_nodes[0] if all(name in names for names in of_nodes)]
        if not everywhere:
            what = "no committed checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointNotFoundError(
                f"there is {what} in {self.directory}{' that every node has' if any(of_nodes) else ''}."
            )
        somewhere = {name for names in of_nodes for name in names[-1:]} - {everywhere[-1]}
        if somewhere and world.is_main:
            warn_user(
                f"not every node has {', '.join(sorted(somewhere))} in {self.directory}: going on from "
                f"{everywhere[-1]}, the newest that all have",
                RuntimeWarning,
            )
        paths = [self.directory / name for name in reversed(everywhere)]
        return paths if step is None else paths[:1]

    def _names(self, step: int | None) -> list[str]:
        paths = _directories(self.directory, self.prefix)
        return [path.name for path in paths if step is None or _step_of(path) == step]

    def _new_directory(self, world: World, step: int) -> Path:
        """`<prefix><step>`, or with a number of its own where that is taken, on any node."""
        doing = f"saving to {self.directory}"
        attempts = together(world, doing, lambda: self._attempt(step) if world.commits(self.save_on_each_node) else 1)
        attempt = max(attempts)
        return self.directory / (f"{self.prefix}{step}" + (f".{attempt}" if attempt > 1 else ""))

    def _attempt(self, step: int) -> int:
        """How many times this step will have been saved here, this time included."""
        if type(step) is not int or step < 0:
            raise CheckpointError(f"step={step!r} is not a count of updates; give an int of at least 0.")
        newest = max(map(_step_of, _directories(self.directory, self.prefix)), default=step)
        if step < newest:
            raise CheckpointError(
                f"step={step} is below {self.prefix}{newest} in {self.directory}: restore() would go on loading that "
                "one, and retention would remove the new one. To go on from an older step, remove the newer "
                "checkpoints first, or use another directory."
            )
        return 1 + max((n for number, n, _ in _numbered(self.directory, self.prefix) if number == step), default=0)

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
    return [path for _, _, path in sorted(_numbered(directory, prefix)) if path.is_dir()]


def _numbered(directory: Path, prefix: str) -> list[tuple[int, int, Path]]:
    """Whatever has such a name: its number, which save of it, and its path."""
    pattern = re.compile(rf"{re.escape(prefix)}(\d+)(?:\.(\d+))?")
    if not directory.is_dir():
        return []
    return [
        (int(match[1]), int(match[2] or 1), path)
        for path in directory.iterdir()
        if (match := pattern.fullmatch(path.name))
    ]


def _step_of(path: Path) -> int:
    return int(re.search(r"(\d+)(?:\.\d+)?$", path.name)[1])  # type: ignore[index] # by _directories
