"""Weights and single objects for others to read: `save_model` and `save`, each at one instant.

A set of shards is in force by its index, which is renamed into place last. Where the new set has the names of the old
one, it comes under other names first, then takes the usual ones: no reader ever sees shards of two sets.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_state.errors import CheckpointError
from accel_state.protocols import Parted

from .boxes import is_sharded
from .commit import Staging, commit, discard, open_staging, real_directory, stage_beside
from .durable import flush_directory, flush_file, make_directories, write_file
from .manifest import manifest_path
from .names import SAFE_WEIGHTS_PATTERN_NAME, WEIGHTS_PATTERN_NAME
from .objects import plain_model
from .ranks import current_world, together
from .shards import Weights, WeightsName, plan_shards, size_in_bytes, split_aliases
from .tensors import write_tensors_unhashed

ALIASES_KEY = "accel.aliases"


def save_model(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    *,
    save_on_each_node: bool = False,
    weights: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model's weights for any reader, wholly or not at all. All ranks call it; rank 0 writes.

    Tied tensors are written once; `accel.aliases` in the files' metadata and in the index tells their further names.
    Older weights of the same name in the directory go once the new ones are in force; nothing else does.

    Args:
        model: bare, or wrapped for data parallelism or by torch.compile.
        save_directory: made if it is not there.
        max_shard_size: of the tensors in one file, in bytes or as "5MB"; a single larger weight has its own file.
        safe_serialization: safetensors; False writes torch's format, `pytorch_model.bin`.
        save_on_each_node: let one process of each node write, for file systems that nodes do not share.
        weights: written in place of the model's own; of a model that ranks share, what was gathered on those that
            write.

    Returns:
        The directory's real path.

    Raises:
        CheckpointError: on all ranks; the weights that were there are intact.

    Cost: writes the weights once and flushes them; one object gather.
    """
    target, world = real_directory(save_directory), current_world()
    limit_bytes = size_in_bytes(max_shard_size)

    def write() -> None:
        if world.commits(save_on_each_node):
            refuse_a_checkpoint(target)
            state = plain_model(model).state_dict() if weights is None else weights
            _refuse_parts(model, state)
            _save_weights(state, target, limit_bytes, safe_serialization)

    together(world, f"saving the model to {target}", write)
    return target


def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write one object to a file, wholly or not at all. All ranks call it; rank 0 writes.

    Args:
        obj: anything that torch can write.
        f: the file; one that is there is replaced at one instant.
        save_on_each_node: let one process of each node write.
        safe_serialization: safetensors; `obj` is then a dict of tensors.

    Raises:
        CheckpointError: on all ranks; a file that was there is intact.

    Cost: writes the object once and flushes it; one object gather.
    """
    target, world = real_directory(f), current_world()

    def write() -> None:
        if not world.commits(save_on_each_node):
            return
        if target.is_dir():
            raise CheckpointError(f"{target} is a directory; save() writes one file. Name a file in it.")
        with one_file(target) as path:
            if safe_serialization:
                _write_safetensors(path, split_aliases(_dict_of_tensors(obj), ""))
            else:
                _write_torch(path, obj)

    together(world, f"saving {target}", write)


def refuse_a_checkpoint(target: Path) -> None:
    """Raise CheckpointError if a directory for weights is a checkpoint."""
    if manifest_path(target):
        raise CheckpointError(
            f"{target} is a checkpoint, which other weights in it would damage; save the model to another directory."
        )


def _refuse_parts(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if these are only parts of the model's weights."""
    inner, sharded = plain_model(model), [name for name, value in state.items() if is_sharded(value)]
    lacking = [name for name in inner.state_names if name not in state] if isinstance(inner, Parted) else []
    if sharded or lacking or (not state and any(True for _ in inner.parameters())):
        shown = f" (as of {', '.join((sharded or lacking)[:3])})" if sharded or lacking else ""
        raise CheckpointError(
            f"this rank has only a part of the weights{shown}: gather all of them on each rank that writes, which with "
            "save_on_each_node is one of every node, and pass weights=..."
        )


def _dict_of_tensors(obj: Any) -> Mapping[str, Any]:
    if isinstance(obj, Mapping):
        return obj
    raise CheckpointError(
        f"safe_serialization=True writes a dict of tensors, not a {type(obj).__name__}; leave it out for other objects"
    )


@contextlib.contextmanager
def one_file(target: Path) -> Iterator[Path]:
    """A path to fill, which becomes the target at the end of the block."""
    make_directories(target.parent)
    staging = stage_beside(target)
    try:
        path = staging.path / target.name
        yield path
        os.replace(path, target)  # noqa: PTH105 - the instant of the commit
        flush_directory(target.parent)
    finally:
        discard(staging)


def write_weights(state: Mapping[str, Any], target: Path, safe_serialization: bool) -> None:
    """Write a model's tensors to one file, at one instant, from this process."""
    weights = split_aliases(state, "")
    with one_file(target) as path:
        (_write_safetensors if safe_serialization else _write_bin)(path, weights)


# ---------------------------------------------------------------- files


def _write_safetensors(path: Path, weights: Weights) -> None:
    metadata = {ALIASES_KEY: json.dumps(dict(weights.aliases))} if weights.aliases else {}
    write_tensors_unhashed(path, weights.tensors, metadata)


def _write_torch(path: Path, obj: Any) -> None:
    with path.open("xb") as file:
        torch.save(obj, file)
    flush_file(path)


def _write_bin(path: Path, weights: Weights) -> None:
    """torch keeps ties by shared storage; a view would bring its whole storage along."""
    whole = {name: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t for name, t in weights.tensors.items()}
    _write_torch(path, {**whole, **{alias: whole[first] for alias, first in weights.aliases.items()}})


# ---------------------------------------------------------------- sets of shards


@dataclass(frozen=True)
class _Set:
    """The files of one save: shard by shard, and the index unless there is one file."""

    name: WeightsName
    weights: Weights
    shards: Sequence[Sequence[str]]
    bin: bool

    def files(self, generation: int) -> list[str]:
        count = len(self.shards)
        return [self.name.shard(i + 1, count, generation) for i in range(count)] if count > 1 else [self.name.single]

    def part(self, names: Sequence[str]) -> Weights:
        inside = set(names)
        return Weights(
            {name: self.weights.tensors[name] for name in names},
            {alias: first for alias, first in self.weights.aliases.items() if first in inside},
        )

    def index(self, generation: int) -> bytes:
        where = {name: f for f, names in zip(self.files(generation), self.shards, strict=True) for name in names}
        metadata: dict[str, Any] = {"total_size": self.weights.total_bytes}
        if self.weights.aliases:
            metadata["aliases"] = dict(self.weights.aliases)
        if self.bin:  # there the further names are in the files
            where |= {alias: where[first] for alias, first in self.weights.aliases.items()}
        return (json.dumps({"metadata": metadata, "weight_map": where}, indent=2) + "\n").encode()


def _save_weights(state: Mapping[str, Any], target: Path, limit_bytes: int, safe: bool) -> None:
    if safe:
        weights = split_aliases(state, "")
    else:
        weights = split_aliases({key: value for key, value in state.items() if isinstance(value, Tensor)}, "")
        if odd := [key for key, value in state.items() if not isinstance(value, Tensor)]:
            raise CheckpointError(
                f"not tensors, so nobody could read them weights-only: {', '.join(odd)}. save_state() keeps them."
            )
    name = WeightsName(SAFE_WEIGHTS_PATTERN_NAME if safe else WEIGHTS_PATTERN_NAME)
    new = _Set(name, weights, plan_shards(weights.tensors, limit_bytes), bin=not safe)
    staging = open_staging(target)
    try:
        generation = 1
        while staging.replaces and len(new.shards) > 1 and _any_there(target, new.files(generation)):
            generation += 1
        write: Callable[[Path, Weights], None] = _write_safetensors if safe else _write_bin
        files = new.files(generation)
        for file, names in zip(files, new.shards, strict=True):
            write(staging.path / file, new.part(names))
        if len(files) > 1:
            write_file(staging.path / name.index, [new.index(generation)])
        if not staging.replaces:
            commit(staging, files)
            return
        _put_in_force(staging, new, generation)
    except BaseException:
        discard(staging)
        raise
    discard(staging)


def _any_there(target: Path, files: Sequence[str]) -> bool:
    return any(os.path.lexists(target / file) for file in files)


def _put_in_force(staging: Staging, new: _Set, generation: int) -> None:
    """Move a set into a directory that may hold an older one; then let it have the usual names."""
    target, files = staging.target, new.files(generation)
    sharded = len(files) > 1
    for file in files:
        os.replace(staging.path / file, target / file)  # noqa: PTH105 - one system call; a single file commits here
    flush_directory(target)
    if sharded:
        os.replace(staging.path / new.name.index, target / new.name.index)  # noqa: PTH105 - a set commits here
        flush_directory(target)
    _remove_stale(target, new.name, [*files, new.name.index] if sharded else files)
    if generation > 1:
        if _give_second_names(target, files, new.files(1)):
            files = new.files(1)
            write_file(staging.path / new.name.index, [new.index(1)])
            os.replace(staging.path / new.name.index, target / new.name.index)  # noqa: PTH105
            flush_directory(target)
        _remove_stale(target, new.name, [*files, new.name.index])


def _give_second_names(target: Path, files: Sequence[str], usual: Sequence[str]) -> bool:
    """Whether the file system could; without hard links the set keeps the names that it has."""
    try:
        for file, name in zip(files, usual, strict=True):
            os.link(target / file, target / name)
    except OSError:
        return False
    flush_directory(target)
    return True


def _remove_stale(target: Path, name: WeightsName, keep: Sequence[str]) -> None:
    there = [path.name for path in target.iterdir() if path.is_symlink() or path.is_file()]
    stale = name.stale(there, keep)
    for file in stale:
        os.unlink(target / file)  # noqa: PTH108
        if file == name.index:
            flush_directory(target)
    if stale:
        flush_directory(target)
