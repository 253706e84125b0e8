"""A save that has begun: every rank's state captured, a directory to fill, and the writing dealt out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from accel_state.errors import CheckpointError

from .commit import Staging, discard, open_staging, real_directory
from .durable import FileEntry
from .layout import Layout, Plan, assign, layout_of
from .parts import Part, parts_of, put_together
from .ranks import World, current_world, together
from .snapshot import Contents, Snapshot, take_snapshot

_OF_ITS_OWN = (
    "With save_on_each_node=True, nodes that share a file system need a directory each; where they do, save without it."
)
BeforeWrite = Callable[[Path], Mapping[str, Mapping[str, Any] | None]]


@dataclass(frozen=True, kw_only=True)
class Save:
    """What this rank does in a save.

    Args:
        path: the directory being filled, which becomes `target`.
        ranks: those that fill it together: all, or those of a node.
        staging: on the rank that commits it.
        rivals: the directories that other nodes fill for a target of the same name.
    """

    world: World
    doing: str
    target: Path
    path: Path
    snapshot: Snapshot
    plan: Plan
    ranks: Sequence[int]
    staging: Staging | None
    rivals: Sequence[str]

    @property
    def is_main(self) -> bool:
        """Whether this rank commits what its ranks write."""
        return self.staging is not None

    @property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What this rank writes: file -> key -> live memory."""
        return self.plan.tensors_of(self.world.rank, self.snapshot.objects)

    def merged(self, parts: Sequence[Mapping[str, FileEntry]]) -> dict[str, FileEntry]:
        """What the ranks that fill this directory wrote, of what each rank wrote."""
        return {name: entry for rank in self.ranks for name, entry in parts[rank].items()}

    def check_alone(self) -> None:
        """Raise CheckpointError if another node is about to commit the same directory."""
        if any(path and os.path.lexists(path) for path in self.rivals):
            raise CheckpointError(f"every node saves to {self.target}, and they share its file system. {_OF_ITS_OWN}")

    def discard(self) -> None:
        """Give it up."""
        if self.staging is not None:
            discard(self.staging)


@dataclass(frozen=True)
class _Said:
    """What ranks tell each other before they write."""

    node: int = 0
    target: str = ""
    staged: str = ""  # by the rank that commits
    layout: Layout = field(default_factory=dict)
    parts: Mapping[str, Part] = field(default_factory=dict)
    rng: Mapping[int, Any] = field(default_factory=dict)  # where one rank writes those of others


def begin(
    directory: str | os.PathLike[str],
    contents: Contents,
    before_write: BeforeWrite | None,
    on_each_node: bool,
) -> Save:
    """Capture on every rank, make the staging directory (with a callback, that first), and deal the writing out."""
    world, target = current_world(), real_directory(directory)
    doing = f"saving to {target}"
    snapshot: Snapshot | None = None
    staging: Staging | None = None

    def stage(said: _Said) -> _Said:
        nonlocal staging
        if world.commits(on_each_node):
            staging = _staged(target, on_each_node)
        node = world.node if on_each_node else 0
        return replace(said, node=node, target=str(target), staged=str(staging.path) if staging else "")

    def capture(said: _Said, instead: Mapping[str, Mapping[str, Any] | None]) -> _Said:
        nonlocal snapshot
        snapshot = take_snapshot(world, contents, instead)
        return replace(
            said,
            layout=layout_of(snapshot.objects),
            parts=parts_of(snapshot.objects),
            rng=snapshot.rng if on_each_node else {},
        )

    try:
        if before_write is None:
            said = together(world, doing, lambda: stage(capture(_Said(), {})))
        else:
            said = together(world, doing, lambda: stage(_Said()))
        ranks, path = _of_my_node(said, world.rank)
        if before_write is not None:
            said = together(world, doing, lambda: capture(said[world.rank], before_write(path)))
        assert snapshot is not None
        snapshot, plan = _plan(said, snapshot, said[world.rank].node)
        if on_each_node:
            every = {rank: state for other in said for rank, state in other.rng.items()}
            snapshot = replace(snapshot, rng=every if staging else {})
    except BaseException:
        if staging is not None:
            discard(staging)
        raise
    return Save(
        world=world,
        doing=doing,
        target=target,
        path=path,
        snapshot=snapshot,
        plan=plan,
        ranks=ranks,
        staging=staging,
        rivals=[one.staged for rank, one in enumerate(said) if rank not in ranks and one.target == str(target)],
    )


def _staged(target: Path, on_each_node: bool) -> Staging:
    try:
        return open_staging(target)
    except CheckpointError as error:
        if not on_each_node:
            raise
        raise CheckpointError(f"{error} {_OF_ITS_OWN}") from error


def _of_my_node(said: Sequence[_Said], rank: int) -> tuple[list[int], Path]:
    """The ranks that write with this one, and the directory that they fill."""
    ranks = [other for other, one in enumerate(said) if one.node == said[rank].node]
    for node in sorted({one.node for one in said}):  # on every rank for every node, so that all raise alike
        named = {other: one.target for other, one in enumerate(said) if one.node == node}
        first = min(named)
        if differing := [f"rank {other}: {path}" for other, path in named.items() if path != named[first]]:
            raise CheckpointError(
                f"the ranks name different directories (rank {first}: {named[first]}; {'; '.join(differing[:4])}): "
                "pass the same one everywhere; the main process writes"
            )
    return ranks, Path(next(said[other].staged for other in ranks if said[other].staged))


def _plan(said: Sequence[_Said], snapshot: Snapshot, mine: int) -> tuple[Snapshot, Plan]:
    """My snapshot with what the ranks of my node add to it, and who of them writes what.

    Checked for every node with shards or parts, so that all ranks raise alike.
    """
    found = {}
    for node in sorted({mine} | {one.node for one in said if one.layout}):
        layouts = {rank: one.layout for rank, one in enumerate(said) if one.node == node}
        main = next(rank for rank in layouts if said[rank].staged)
        objects = put_together(snapshot.objects, {rank: said[rank].parts for rank in layouts})
        found[node] = replace(snapshot, objects=objects), assign(objects, snapshot.files, layouts, main)
    return found[mine]
