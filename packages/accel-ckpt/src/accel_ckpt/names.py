"""File names and constants, free of torch: the peer's for what users meet, ours for the rest."""

from __future__ import annotations

import re

# ---- the peer's names (`accelerate.checkpointing`, `accelerate.utils`)
MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"
WEIGHTS_NAME = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME = f"{MODEL_NAME}{{suffix}}.bin"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME = f"{SAFE_MODEL_NAME}{{suffix}}.safetensors"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"
"""Names of files in the peer's checkpoints, and of weights for any reader; a set of shards fills `{suffix}` in."""

# ---- ours
FORMAT_NAME = "accel-checkpoint"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"
STATE_TENSORS_NAME = "state.safetensors"
JOURNAL_NAME = ".accel-journal"
OWNER_NAME = ".accel-owner"
STAGING_MARK = ".accel-staging-"
CREW_MARK = ".accel-rank-"
TRASH_MARK = ".accel-trash-"


def model_file(ordinal: int) -> str:
    """The weights' file of the n-th model: `model.safetensors`, `model_1.safetensors`, …"""
    return f"{SAFE_MODEL_NAME}{f'_{ordinal}' if ordinal else ''}.safetensors"


def optimizer_file(ordinal: int) -> str:
    """The tensors' file of the n-th optimizer: `optimizer.safetensors`, `optimizer_1.safetensors`, …"""
    return f"{OPTIMIZER_NAME}{f'_{ordinal}' if ordinal else ''}.safetensors"


def shard_file(file: str, rank: int) -> str:
    """The file of a rank's part of what would be one file: `model-shard-00003.safetensors`."""
    stem, _, suffix = file.rpartition(".")
    return f"{stem}-shard-{rank:05d}.{suffix}"


def unsharded(file: str) -> str:
    """The inverse of `shard_file`, for any rank."""
    return re.sub(r"-shard-\d{5}(\.\w+)$", r"\1", file)


def rng_file(rank: int) -> str:
    """The generators' file of one rank."""
    return f"{RNG_STATE_NAME}_{rank}.json"
