"""Checkpoints that accelerate's `save_state` wrote: read weights-only, checked as a whole, then loaded.

Their files are numbered, not named, so objects have to come in the order in which they were prepared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from accel_state import warn_user
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError, CheckpointNotFoundError
from accel_state.protocols import Stateful

from .commit import real_directory
from .manifest import manifest_path, read_manifest
from .names import MODEL_NAME, OPTIMIZER_NAME, RNG_STATE_NAME, SAFE_MODEL_NAME, SCALER_NAME, SCHEDULER_NAME
from .objects import plain_model
from .peer_files import generators_file, numbered, numbers_allowed
from .tensors import same_memory_key
from .weights import load, read_weights

_WRAPPED = "module."  # what data parallel wrappers put before the names


def is_accelerate_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory holds accelerate's files: it was saved there, or here with safe_serialization=False."""
    path = real_directory(directory)
    if not path.is_dir():
        return False
    if found := manifest_path(path):
        return generators_file(0) in read_manifest(found).files
    return any(path.glob(f"{RNG_STATE_NAME}_*.pkl"))


def load_accelerate_checkpoint(
    directory: str | os.PathLike[str],
    *,
    models: Sequence[nn.Module] = (),
    optimizers: Sequence[Any] = (),
    schedulers: Sequence[Stateful] = (),
    scaler: Stateful | None = None,
    custom_objects: Sequence[Stateful] = (),
    process_index: int = 0,
) -> int | None:
    """Load what accelerate saved into objects, each in the order in which it was prepared or registered.

    Everything is read before the first object changes. Pickled parts are read weights-only, which runs no code.
    Loaders' positions are not among what accelerate saves.

    Args:
        process_index: whose random generators to restore.

    Returns:
        The micro-batches so far (`Accelerator.step`), if the checkpoint says.

    Raises:
        CheckpointNotFoundError: no file for one of the objects; names it.
        CheckpointCorruptError: a file that cannot be read, or only by running code.
        CheckpointMismatchError: weights of other names or shapes; nothing was changed.
    """
    path = real_directory(directory)
    if not path.is_dir():
        raise CheckpointNotFoundError(f"there is no directory {path}")
    weights = [_read_model(path, number, model) for number, model in enumerate(models)]
    parts: list[tuple[Stateful, str]] = [
        *((optimizer, numbered(OPTIMIZER_NAME, i, ".bin")) for i, optimizer in enumerate(optimizers)),
        *((scheduler, numbered(SCHEDULER_NAME, i, ".bin")) for i, scheduler in enumerate(schedulers)),
        *((custom, f"custom_checkpoint_{i}.pkl") for i, custom in enumerate(custom_objects)),
        *([(scaler, SCALER_NAME)] if scaler is not None else []),
    ]
    states = [_read(path / file) for _, file in parts]
    rng = _read_rng(path / f"{RNG_STATE_NAME}_{process_index}.pkl")
    for model, state in zip(models, weights, strict=True):
        plain_model(model).load_state_dict(state, strict=False)
    for (target, file), state in zip(parts, states, strict=True):
        _apply(target, state, path / file)
    _restore_rng(rng, path, process_index)
    return rng.get("step")


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Stateful],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: Stateful | None = None,
    map_location: Any = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """`load_accelerate_checkpoint` by the peer's signature.

    Args:
        dataloaders: not needed: their positions are not in the files.
        map_location: None, "cpu" or "on_device": tensors go where the objects have theirs anyway.

    Returns:
        `{"step": ...}` if the checkpoint says it.

    Raises:
        CheckpointError: an option that cannot be honoured; otherwise as `load_accelerate_checkpoint`.
    """
    del dataloaders
    options = {**(load_kwargs or {}), **load_model_func_kwargs}
    if options.pop("weights_only", True) is not True:
        raise CheckpointError("load_accelerator_state reads weights-only; weights_only=False cannot be honoured")
    if options or map_location not in (None, "cpu", "on_device"):
        odd = options or {"map_location": map_location}
        raise CheckpointError(f"load_accelerator_state cannot honour {odd}; map_location is None, 'cpu' or 'on_device'")
    step = load_accelerate_checkpoint(
        input_dir,
        models=models,
        optimizers=optimizers,
        schedulers=schedulers,
        scaler=scaler,
        process_index=process_index,
    )
    return {} if step is None else {"step": step}


# ---------------------------------------------------------------- reading


def _read_model(directory: Path, number: int, model: nn.Module) -> dict[str, Tensor]:
    """A model's weights under the names that it has here, checked against it."""
    names = [numbered(SAFE_MODEL_NAME, number, ".safetensors"), numbered(MODEL_NAME, number, ".bin")]
    names += [f"{name}.index.json" for name in names]
    found = next((directory / name for name in names if (directory / name).is_file()), None)
    if found is None:
        raise CheckpointNotFoundError(f"{directory} has no weights for model {number}: none of {', '.join(names)}")
    state: dict[str, Tensor] = {}
    read_weights(found, state.__setitem__)
    here = plain_model(model).state_dict()
    if state and all(name.startswith(_WRAPPED) for name in state) and not any(n.startswith(_WRAPPED) for n in here):
        state = {name.removeprefix(_WRAPPED): tensor for name, tensor in state.items()}
    if lines := _differences(state, here):
        raise CheckpointMismatchError(f"{found} does not fit model {number}: {'; '.join(lines[:20])}")
    return state


def _differences(state: Mapping[str, Tensor], here: Mapping[str, Any]) -> list[str]:
    """In words; a name that is missing is none if it is tied to one that is there."""
    given = {same_memory_key(here[name]) for name in state if isinstance(here.get(name), Tensor)} - {None}
    lines = [
        f"{name}: missing in the checkpoint"
        for name, value in here.items()
        if name not in state and not (isinstance(value, Tensor) and same_memory_key(value) in given)
    ]
    lines += [f"{name}: only in the checkpoint" for name in state if name not in here]
    lines += [
        f"{name}: shape {tuple(tensor.shape)} in the checkpoint, {tuple(here[name].shape)} here"
        for name, tensor in state.items()
        if isinstance(here.get(name), Tensor) and tensor.shape != here[name].shape
    ]
    return lines


def _read(path: Path) -> Any:
    with numbers_allowed():
        return load(path, map_location="cpu")


def _read_rng(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    state = _read(path)
    if not isinstance(state, dict):
        raise CheckpointCorruptError(f"{path} holds a {type(state).__name__}, not the generators' states")
    return state


# ---------------------------------------------------------------- loading


def _apply(target: Stateful, state: Any, path: Path) -> None:
    try:
        target.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(
            f"{path} does not fit {type(target).__name__}: {error}. What came before it is loaded; load again or start "
            "anew."
        ) from error


def _restore_rng(saved: Mapping[str, Any], directory: Path, process_index: int) -> None:
    from accel_state import restore_rng_state

    if not saved:
        warn_user(
            f"{directory} has no random generators of process {process_index}: they go on as they are.", RuntimeWarning
        )
        return
    readers: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "random_state": ("python", lambda s: {"version": s[0], "numbers": list(s[1]), "gauss": s[2]}),
        "numpy_random_seed": ("numpy", _numpy_state),
        "torch_manual_seed": ("torch", lambda s: s),
        "torch_cuda_manual_seed": ("cuda", list),
    }
    lost = sorted(saved.keys() - readers.keys() - {"step"})
    if lost:
        warn_user(f"{directory}: left unread: {', '.join(lost)}", RuntimeWarning)
    restore_rng_state({name: read(saved[key]) for key, (name, read) in readers.items() if key in saved})


def _numpy_state(saved: Sequence[Any]) -> dict[str, Any]:
    algorithm, keys, position, has_gauss, cached = saved
    return {
        "algorithm": str(algorithm),
        "keys": keys.tolist(),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "cached_gauss": float(cached),
    }
