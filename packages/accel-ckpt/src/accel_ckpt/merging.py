"""Weights that lie in parts, made whole: for readers that know one file per model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from accel_state.errors import CheckpointError, CheckpointNotFoundError

from .commit import real_directory, remove_checkpoint
from .dcp import is_dcp, read_dcp_tensors
from .export import refuse_a_checkpoint, write_weights
from .loading import verify_checkpoint
from .manifest import Manifest, manifest_path
from .names import MODEL_NAME, SAFE_MODEL_NAME, STATE_TENSORS_NAME
from .peer_files import numbered
from .ranks import current_world, from_main
from .stored import open_tensors

_MODEL_KEY = "model."  # what FSDP's sharded checkpoints put before a model's names


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> Path:
    """Write the whole weights of a sharded checkpoint as one file per model.

    Args:
        checkpoint_dir: a checkpoint of accel, or a directory of torch.distributed.checkpoint, such as FSDP's
            `pytorch_model_fsdp_0`.
        output_path: the directory for `model.safetensors`; made if it is not there.
        safe_serialization: False writes `pytorch_model.bin`.
        remove_checkpoint_dir: remove the checkpoint afterwards; of accel's own only what it wrote.

    Returns:
        The output directory's real path.

    Raises:
        CheckpointNotFoundError: neither kind of checkpoint there, or one without a model.
        CheckpointCorruptError: it is damaged, or would run code when it is read.
        CheckpointError: the output would lie in a checkpoint.

    Cost: reads and writes the weights once; memory for one model, where it lies in shards. All ranks call it; rank 0
    works.
    """
    source, target = real_directory(checkpoint_dir), real_directory(output_path)
    from_main(
        current_world(),
        f"merging the weights of {source}",
        lambda: _merge(source, target, safe_serialization, remove_checkpoint_dir),
    )
    return target


def _merge(source: Path, target: Path, safe: bool, remove: bool) -> None:
    ours = source.is_dir() and manifest_path(source) is not None
    if not ours and not is_dcp(source):
        raise CheckpointNotFoundError(
            f"{source} is no checkpoint with sharded weights: it holds neither a manifest.json nor a .metadata"
        )
    if target.is_relative_to(source):
        raise CheckpointError(f"{target} lies in the checkpoint {source}; name a directory outside of it")
    refuse_a_checkpoint(target)
    name, suffix = (SAFE_MODEL_NAME, ".safetensors") if safe else (MODEL_NAME, ".bin")
    count = 0
    for weights in _our_models(source, verify_checkpoint(source)) if ours else [_dcp_model(source)]:
        if weights:
            write_weights(weights, target / numbered(name, count, suffix), safe)
            count += 1
    if not count:
        raise CheckpointNotFoundError(f"{source} holds no model's weights")
    if remove and ours:
        remove_checkpoint(source)
    elif remove:
        shutil.rmtree(source)


def _our_models(source: Path, manifest: Manifest) -> Iterator[Mapping[str, Tensor]]:
    for name, entry in manifest.objects.items():
        if entry.kind != "model":
            continue
        stored = open_tensors(source, manifest, [name])[name]
        weights = {key: t.whole() for key, t in stored.items() if entry.tensors[key].file != STATE_TENSORS_NAME}
        yield {**weights, **{alias: weights[first] for alias, first in entry.aliases.items()}}


def _dcp_model(source: Path) -> Mapping[str, Tensor]:
    tensors = read_dcp_tensors(source, lambda key: not key.startswith(("optimizer.", "optim.")))
    if tensors and all(key.startswith(_MODEL_KEY) for key in tensors):
        return {key.removeprefix(_MODEL_KEY): tensor for key, tensor in tensors.items()}
    return tensors
