"""The files of accelerate's `save_state`: their names, what is in them, and writing them from live objects."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel_state.errors import CheckpointError
from accel_state.protocols import Stateful

from .boxes import is_sharded
from .commit import real_directory
from .durable import flush_file, make_directories
from .export import one_file, save
from .manifest import Manifest
from .names import MODEL_NAME, OPTIMIZER_NAME, RNG_STATE_NAME, SAFE_MODEL_NAME, SCALER_NAME, SCHEDULER_NAME
from .ranks import current_world, together
from .shards import split_aliases
from .tensors import write_tensors_unhashed


def numbered(name: str, number: int, suffix: str) -> str:
    """`optimizer.bin`, `optimizer_1.bin`, …"""
    return f"{name}{f'_{number}' if number else ''}{suffix}"


def generators_file(rank: int) -> str:
    """Where accelerate keeps a rank's random generators."""
    return f"{RNG_STATE_NAME}_{rank}.pkl"


def refuse_accelerate_files(path: Path, manifest: Manifest) -> None:
    """Raise CheckpointError if a checkpoint of ours holds its state as accelerate's files already."""
    if generators_file(0) in manifest.files:
        raise CheckpointError(
            f"{path} was saved with safe_serialization=False: it is in accelerate's layout already, and nothing else "
            "can be made of it. Load it, and save again without that option."
        )


def generators_for_peer(saved: Mapping[str, Any], step: int) -> dict[str, Any]:
    """`accel_state.capture_rng_state` in accelerate's form, with the micro-batches so far."""
    python = saved["python"]
    states: dict[str, Any] = {
        "step": step,
        "random_state": (python["version"], tuple(python["numbers"]), python["gauss"]),
        "torch_manual_seed": saved["torch"],
    }
    if numpy := saved.get("numpy"):
        keys = np.array(numpy["keys"], dtype=np.uint32)
        rest = (numpy["position"], numpy["has_gauss"], numpy["cached_gauss"])
        states["numpy_random_seed"] = (numpy["algorithm"], keys, *rest)
    if "cuda" in saved:
        states["torch_cuda_manual_seed"] = list(saved["cuda"])
    return states


@contextlib.contextmanager
def numbers_allowed() -> Iterator[None]:
    """Arrays of numbers, which the generators' files hold, are plain data too."""
    dtypes = [type(np.dtype(name)) for name in ("uint8", "uint32", "uint64", "int64", "float64")]
    plain = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, *dtypes]  # type: ignore[attr-defined] # noqa: SLF001
    with torch.serialization.safe_globals(plain):
        yield


def write_torch_file(path: Path, state: Any) -> None:
    """`torch.save`, flushed.

    Raises:
        CheckpointError: it holds what nobody could read weights-only.
    """
    torch.save(state, path)
    with numbers_allowed():
        odd = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if odd:
        raise CheckpointError(
            f"{path.name} would hold {', '.join(odd)}, which cannot be read weights-only; states are made of tensors, "
            "numbers, strings, lists, tuples and dicts"
        )
    flush_file(path)


def write_accelerate_files(
    path: Path,
    *,
    models: Sequence[Mapping[str, Any]] = (),
    optimizers: Sequence[Any] = (),
    schedulers: Sequence[Stateful] = (),
    scaler: Stateful | None = None,
    custom_objects: Sequence[Stateful] = (),
    step: int = 0,
    safe_serialization: bool = True,
    save_on_each_node: bool = False,
) -> None:
    """Fill a directory with what accelerate's `save_state` writes. All ranks call it; each writes its generators.

    Rank 0 writes the rest.

    Meant as `before_commit` of a save, which makes a transaction of it.

    Args:
        path: the directory.
        models: their state dicts, in the order in which they were prepared; so are optimizers and schedulers.
        step: micro-batches so far.
        safe_serialization: weights as safetensors; False writes `pytorch_model.bin`.
        save_on_each_node: one process of each node writes the rest; give what the save has.

    Raises:
        CheckpointError: a tensor is sharded, which these files have no form for.
    """
    from accel_state import capture_rng_state

    world = current_world()
    write_torch_file(path / generators_file(world.rank), generators_for_peer(capture_rng_state(), step))
    if not world.commits(save_on_each_node):
        return
    for i, state in enumerate(models):
        _refuse_sharded(f"model {i}", state)
        if safe_serialization:
            weights = split_aliases(state, f"model {i}: ")
            write_tensors_unhashed(path / numbered(SAFE_MODEL_NAME, i, ".safetensors"), weights.tensors, {})
        else:
            write_torch_file(path / numbered(MODEL_NAME, i, ".bin"), dict(state))
    parts: list[tuple[str, Stateful]] = [
        *((numbered(OPTIMIZER_NAME, i, ".bin"), optimizer) for i, optimizer in enumerate(optimizers)),
        *((numbered(SCHEDULER_NAME, i, ".bin"), scheduler) for i, scheduler in enumerate(schedulers)),
        *((f"custom_checkpoint_{i}.pkl", custom) for i, custom in enumerate(custom_objects)),
        *([(SCALER_NAME, scaler)] if scaler is not None else []),
    ]
    for file, value in parts:
        state = value.state_dict()
        _refuse_sharded(file, state)
        write_torch_file(path / file, state)


def _refuse_sharded(where: str, tree: Any) -> None:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            _refuse_sharded(f"{where}: {key}", value)
    elif isinstance(tree, Tensor) and is_sharded(tree):
        raise CheckpointError(
            f"{where} is sharded over ranks, and accelerate's files hold whole tensors: save with "
            "safe_serialization=True, then `accel ckpt convert --to accelerate`"
        )


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Stateful],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: Stateful | None = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write accelerate's files by the peer's signature, each at one instant. All ranks call it.

    The set as a whole is no transaction; `save_checkpoint` and `Accelerator.save_state` are.

    Args:
        dataloaders: not needed: accelerate's files have no place for their positions.
        process_index: whose random generators this process writes.

    Returns:
        The directory.

    Raises:
        CheckpointError: on all ranks.
    """
    from accel_state import capture_rng_state

    del dataloaders
    target, world = real_directory(output_dir), current_world()
    for i, weights in enumerate(model_states):
        name = numbered(SAFE_MODEL_NAME, i, ".safetensors") if safe_serialization else numbered(MODEL_NAME, i, ".bin")
        _refuse_sharded(f"model {i}", weights)
        save(weights, target / name, save_on_each_node, safe_serialization)
    parts: list[tuple[str, Stateful]] = [
        *((numbered(OPTIMIZER_NAME, i, ".bin"), optimizer) for i, optimizer in enumerate(optimizers)),
        *((numbered(SCHEDULER_NAME, i, ".bin"), scheduler) for i, scheduler in enumerate(schedulers)),
        *([(SCALER_NAME, scaler)] if scaler is not None else []),
    ]
    for file, value in parts:
        state = value.state_dict()
        _refuse_sharded(file, state)
        save(state, target / file, save_on_each_node)

    def write_own() -> None:
        make_directories(target)
        with one_file(target / generators_file(process_index)) as path:
            write_torch_file(path, generators_for_peer(capture_rng_state(), step))

    together(world, f"saving to {target}", write_own)
    return target
