"""Live states in the format of torch.distributed.checkpoint: saved by all ranks, loaded without running code."""

from __future__ import annotations

import io
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from accel_state.errors import CheckpointError, CheckpointNotFoundError

from .commit import real_directory
from .dcp import METADATA_NAME, CheckedReader, is_dcp, quiet, read_metadata
from .durable import flush_directory, flush_file, make_directories
from .ranks import current_world, from_main, together
from .weights import load


def save_dcp(state: dict[str, Any], directory: str | os.PathLike[str]) -> None:
    """Write a state in torch's sharded format. All ranks call it, and each writes its parts of sharded tensors.

    It is written beside its place and renamed. One of the same name that is there is replaced: a kill between the two
    renames leaves the old one under a hidden name beside it, whole.

    Raises:
        CheckpointError: on all ranks: what is there is no such checkpoint, or holds other files too; or writing failed.

    Cost: writes the state once and flushes it; torch's object collectives for the plan.
    """
    target, world = real_directory(directory), current_world()
    doing = f"saving {target}"

    def stage() -> Path:
        _refuse_other_files(target)
        make_directories(target.parent)
        path = target.with_name(f".{target.name}.new-{secrets.token_hex(8)}")
        path.mkdir()
        return path

    path = from_main(world, doing, stage)
    try:
        with quiet():
            dcp_save(state, storage_writer=FileSystemWriter(path), no_dist=not dist.is_initialized())
        from_main(world, doing, lambda: _put_in_place(path, target))
    except (CheckpointException, CheckpointError) as error:
        if world.is_main:
            shutil.rmtree(path, ignore_errors=True)  # the reason for giving up is being raised, and matters more
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{doing} failed: {error}") from error


def _refuse_other_files(target: Path) -> None:
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise CheckpointError(f"{target} is a file; a sharded state is a directory. Choose another path.")
    names = {path.name for path in target.iterdir()}
    if odd := sorted(name for name in names if name != METADATA_NAME and not name.endswith(".distcp")):
        raise CheckpointError(
            f"{target} holds other files ({', '.join(odd[:4])}), which stay: choose another directory."
        )


def _put_in_place(path: Path, target: Path) -> None:
    for file in path.iterdir():
        flush_file(file)
    flush_directory(path)
    old = target.with_name(f".{target.name}.old-{secrets.token_hex(8)}")
    replaces = target.is_dir()
    if replaces:
        os.rename(target, old)  # noqa: PTH104 - one system call
    os.rename(path, target)  # noqa: PTH104
    flush_directory(target.parent)
    if replaces:
        shutil.rmtree(old)


def load_dcp(state: dict[str, Any], directory: str | os.PathLike[str]) -> None:
    """Read such a state into one of the same form, in place. All ranks call it; any world size reads any other's.

    Args:
        state: its tensors are written over, each rank's own parts; other values are exchanged.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError: on all ranks: none there; its metadata is damaged or names
            code.
        CheckpointError: on all ranks: it does not hold all that the state has, a file of it is damaged, or a value in
            it would run code.

    Cost: each rank reads its parts; torch's object collectives for the plan.
    """
    path, world = real_directory(directory), current_world()

    def check() -> Metadata:
        if not is_dcp(path):
            raise CheckpointNotFoundError(f"{path} is no checkpoint of torch.distributed.checkpoint")
        return read_metadata(path)

    doing = f"loading {path}"
    metadata = from_main(world, doing, check)
    reader = CheckedReader(path, metadata)
    try:
        with quiet():
            dcp_load(state, storage_reader=reader, planner=_PlainPlanner(), no_dist=not dist.is_initialized())
    except (CheckpointException, RuntimeError) as error:
        raise CheckpointError(f"{doing} failed: {error}") from error


class _PlainPlanner(DefaultLoadPlanner):
    """torch's planner, which unpickles what is no tensor: that is read weights-only first and handed on anew."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take a value that runs no code."""
        checked = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)


def load_whole(f: str | os.PathLike[str]) -> Any:
    """A file of torch's on every rank, weights-only and mapped. All ranks call it.

    Raises:
        CheckpointError: on all ranks, as `load` on any.
    """
    found: list[Any] = []
    together(current_world(), f"loading {f}", lambda: found.append(load(f, map_location="cpu", mmap=True)))
    return found[0]
