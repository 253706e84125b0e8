"""Our checkpoints in accelerate's layout, for `Accelerator.load_state` over there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from accel_state.errors import CheckpointError

from .codec import decode, load_json
from .commit import real_directory, written_whole
from .durable import read_json_bytes
from .loading import verify_checkpoint
from .manifest import Manifest, data_path
from .names import OPTIMIZER_NAME, SAFE_MODEL_NAME, SCALER_NAME, SCHEDULER_NAME, STATE_NAME, rng_file
from .peer_files import (
    generators_file,
    generators_for_peer,
    numbered,
    refuse_accelerate_files,
    write_torch_file,
)
from .stored import open_tensors
from .tensors import write_tensors_unhashed

_OURS = ("accelerator", "trackers")


def convert_to_accelerate(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[str]:
    """Write a checkpoint of ours as accelerate's `save_state` would have.

    Args:
        source: a committed checkpoint.
        target: a new directory.

    Returns:
        What accelerate has no place for, and was left out.

    Raises:
        CheckpointError: the target exists, a state needs a codec, or the state lies in accelerate's files already.
        CheckpointNotFoundError, CheckpointCorruptError: as `load_checkpoint`.

    Cost: reads and writes the state once.
    """
    path, new = real_directory(source), real_directory(target)
    if os.path.lexists(new):
        raise CheckpointError(f"{new} exists already; name a new directory")
    manifest = verify_checkpoint(path)
    refuse_accelerate_files(path, manifest)
    trees = load_json(read_json_bytes(data_path(path, STATE_NAME)), STATE_NAME)
    with written_whole(new) as folder:
        return _write_all(folder, path, manifest, trees)


def _write_all(new: Path, path: Path, manifest: Manifest, trees: Mapping[str, Any]) -> list[str]:
    counts: dict[str, int] = {}
    left_out = []
    for name, entry in manifest.objects.items():
        tensors = _tensors_of(path, manifest, name)
        tree = trees[name]
        if entry.kind == "model":
            own = {
                key: tensor for key, tensor in tensors.items() if entry.tensors[key].file.startswith(SAFE_MODEL_NAME)
            }
            write_tensors_unhashed(new / _next(counts, SAFE_MODEL_NAME, ".safetensors"), own, {})
            left_out += [f"{name}: extra state"] if tree["extra"] else []
        elif entry.kind == "optimizer":
            write_torch_file(new / _next(counts, OPTIMIZER_NAME, ".bin"), _numbered_state(name, tree, tensors))
        elif name in _OURS or "DataLoader" in entry.type:
            left_out += [] if name in _OURS else [f"{name}: {entry.type}"]
        else:
            state = decode(tree, tensors, where=name)
            write_torch_file(new / _file_of(counts, entry.type, state), state)
    step = trees["accelerator"]["step"] if "accelerator" in trees else manifest.step or 0
    for rank in range(manifest.world_size):
        if rng_file(rank) in manifest.files:
            file = data_path(path, rng_file(rank))
            saved = decode(load_json(read_json_bytes(file), str(file)), {}, where=str(file))
            write_torch_file(new / generators_file(rank), generators_for_peer(saved, step))
    return left_out


def _tensors_of(path: Path, manifest: Manifest, name: str) -> dict[str, Tensor]:
    return {key: stored.whole() for key, stored in open_tensors(path, manifest, [name])[name].items()}


def _file_of(counts: dict[str, int], kind: str, state: Any) -> str:
    """Where accelerate keeps an object of this type: as scaler, scheduler, or registered object."""
    if kind == "GradScaler":
        return SCALER_NAME
    if isinstance(state, dict) and "last_epoch" in state:
        return _next(counts, SCHEDULER_NAME, ".bin")
    number = counts.setdefault("custom", 0)
    counts["custom"] += 1
    return f"custom_checkpoint_{number}.pkl"


def _next(counts: dict[str, int], name: str, suffix: str) -> str:
    number = counts.setdefault(name, 0)
    counts[name] += 1
    return numbered(name, number, suffix)


def _numbered_state(name: str, tree: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """torch's own layout: parameters by number, in the order of the groups."""
    groups = decode(tree["groups"], tensors, where=name)
    numbers = {key: i for i, key in enumerate(key for group in groups for key in group["params"])}
    return {
        "state": {
            numbers[key]: {field: decode(value, tensors, where=f"{name}: {key}") for field, value in values.items()}
            for key, values in tree["state"].items()
        },
        "param_groups": [{**group, "params": [numbers[key] for key in group["params"]]} for group in groups],
        **decode(tree["rest"], tensors, where=name),
    }
