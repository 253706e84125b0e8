"""Checkpoints that accelerate's `save_state` wrote: read weights-only, checked as a whole, then loaded.

Their files are numbered, not named, so objects have to come in the order in which they were prepared.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
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
from .ranks import current_world, together
from .tensors import same_memory_key
from .weights import load, read_weights

logger = logging.getLogger("accel_ckpt")
_WRAPPED = "module."  # what data parallel wrappers put before the names
_MAX_LISTED = 20
# accelerate's files but for generators, which each process has of its own
_STATE = re.compile(
    r"(model|pytorch_model|optimizer|scheduler|sampler|dl_state_dict|custom_checkpoint)(_\d+)?\.(safetensors|bin|pkl)"
    r"|scaler\.pt"
)


def is_accelerate_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory holds accelerate's files: it was saved there, or here with safe_serialization=False.

    Without generators' files, which accelerate writes last, it was left by a save that died.
    """
    path = real_directory(directory)
    if not path.is_dir():
        return False
    found = manifest_path(path)
    try:
        names = read_manifest(found).files if found else [file.name for file in path.iterdir()]
    except CheckpointError:
        return False
    return any(fnmatch(name, f"{RNG_STATE_NAME}_*.pkl") for name in names)


def load_accelerate_checkpoint(
    directory: str | os.PathLike[str],
    *,
    models: Sequence[nn.Module] = (),
    optimizers: Sequence[Any] = (),
    schedulers: Sequence[Stateful] = (),
    scaler: Stateful | None = None,
    custom_objects: Sequence[Stateful] = (),
    process_index: int = 0,
    strict: bool = True,
    before_load: Callable[[Path], Collection[int]] | None = None,
) -> int | None:
    """Load what accelerate saved into objects, each in the order in which it was prepared or registered.

    Everything is read before the first object changes. Pickled parts are read weights-only, which runs no code.
    Loaders' positions are not loaded; what the objects leave unread is named by one line at info level. All ranks call
    it.

    Args:
        process_index: whose random generators to restore.
        strict: raise on any difference; if False, load what fits and warn of the rest.
        before_load: called on every rank with the directory; returns the numbers of models to leave as they are. The
            files' numbers are then those of the others.

    Returns:
        The micro-batches so far (`Accelerator.step`), if the checkpoint says.

    Raises:
        CheckpointNotFoundError: no file for one of the objects; names it.
        CheckpointCorruptError: a file that cannot be read, or only by running code.
        CheckpointMismatchError: weights of other names or shapes, or an optimizer of other groups; nothing was changed.

    Cost: reads each file once; memory for all that is in torch's format; two object gathers of a few hundred bytes.
    """
    path, world = real_directory(directory), current_world()
    opened: AccelerateCheckpoint | None = None

    def read() -> None:
        nonlocal opened
        left_out = before_load(path) if before_load is not None else ()
        opened = open_accelerate_checkpoint(
            path,
            models=[model for i, model in enumerate(models) if i not in left_out],
            optimizers=optimizers,
            schedulers=schedulers,
            scaler=scaler,
            custom_objects=custom_objects,
            process_index=process_index,
            strict=strict,
        )

    together(world, f"loading {path}", read)
    assert opened is not None
    return opened.load()


@dataclass(frozen=True, kw_only=True)
class AccelerateCheckpoint:
    """Accelerate's files, read and compared with the objects that they go into.

    Args:
        weights: each model with the weights that it gets.
        parts: each other object with its state and the file that it came from.
        rng: this process's generators, and the step; empty if there are none.
        process_index: whose they are.
        lines: what does not fit, in words (not strict).
    """

    directory: Path
    weights: Sequence[tuple[nn.Module, Mapping[str, Tensor]]]
    parts: Sequence[tuple[Stateful, Any, str]]
    rng: Mapping[str, Any]
    process_index: int
    lines: Sequence[str]

    def load(self) -> int | None:
        """Give the objects their states; all ranks call it.

        Returns:
            The micro-batches so far, if the checkpoint says.

        Raises:
            CheckpointError: on all ranks: an object refused its state; those before it are loaded.
        """
        world = current_world()
        together(world, f"loading {self.directory}", self._apply)
        if self.lines and world.is_main:
            shown = "; ".join(self.lines[:_MAX_LISTED])
            warn_user(f"{self.directory} does not fit wholly; left out: {shown}", RuntimeWarning)
        return self.rng.get("step")

    def _apply(self) -> None:
        for model, state in self.weights:
            plain_model(model).load_state_dict(state, strict=False)
        for target, state, file in self.parts:
            _apply(target, state, self.directory / file)
        _restore_rng(self.rng, self.directory, self.process_index)


def open_accelerate_checkpoint(
    directory: Path,
    *,
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Stateful],
    scaler: Stateful | None,
    custom_objects: Sequence[Stateful],
    process_index: int,
    strict: bool,
) -> AccelerateCheckpoint:
    """The first half of `load_accelerate_checkpoint`, of one rank: read and compare, change nothing."""
    if not directory.is_dir():
        raise CheckpointNotFoundError(f"there is no directory {directory}")
    lines: list[str] = []
    used: set[str] = {generators_file(process_index)}
    weights = []
    for number, model in enumerate(models):
        file = _model_file(directory, number)
        if file is None:
            names = ", ".join(_model_names(number))
            _missing(lines, f"{directory} has no weights for model {number}: none of {names}", strict)
            continue
        used.add(file)
        weights.append((model, _fitting(directory / file, number, model, lines)))
    files: list[tuple[Stateful, str]] = [
        *((optimizer, numbered(OPTIMIZER_NAME, i, ".bin")) for i, optimizer in enumerate(optimizers)),
        *((scheduler, numbered(SCHEDULER_NAME, i, ".bin")) for i, scheduler in enumerate(schedulers)),
        *((custom, f"custom_checkpoint_{i}.pkl") for i, custom in enumerate(custom_objects)),
        *([(scaler, SCALER_NAME)] if scaler is not None else []),
    ]
    parts = []
    for target, file in files:
        if not (directory / file).exists():
            _missing(lines, f"{directory} has no {file} for {type(target).__name__}", strict)
            continue
        used.add(file)
        state = _read(directory / file)
        if reason := _grouped_otherwise(target, state):
            lines.append(f"{file}: {reason}")
        else:
            parts.append((target, state, file))
    if strict and lines:
        raise CheckpointMismatchError(
            f"{directory} does not fit: {'; '.join(lines[:_MAX_LISTED])}. strict=False loads what fits."
        )
    _tell_unread(directory, used)
    return AccelerateCheckpoint(
        directory=directory,
        weights=weights,
        parts=parts,
        rng=_read_rng(directory / generators_file(process_index)),
        process_index=process_index,
        lines=lines,
    )


def _missing(lines: list[str], text: str, strict: bool) -> None:
    if strict:
        raise CheckpointNotFoundError(text)
    lines.append(text)


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


def _model_names(number: int) -> list[str]:
    names = [numbered(SAFE_MODEL_NAME, number, ".safetensors"), numbered(MODEL_NAME, number, ".bin")]
    return names + [f"{name}.index.json" for name in names]


def _model_file(directory: Path, number: int) -> str | None:
    return next((name for name in _model_names(number) if (directory / name).is_file()), None)


def _fitting(path: Path, number: int, model: nn.Module, lines: list[str]) -> dict[str, Tensor]:
    """A model's weights under the names that it has here; what does not fit it is left out and put into words."""
    state: dict[str, Tensor] = {}
    read_weights(path, state.__setitem__)
    here = plain_model(model).state_dict()
    if state and all(name.startswith(_WRAPPED) for name in state) and not any(n.startswith(_WRAPPED) for n in here):
        state = {name.removeprefix(_WRAPPED): tensor for name, tensor in state.items()}
    lines += [f"model {number}: {line}" for line in _differences(state, here)]
    return {name: tensor for name, tensor in state.items() if _fits(tensor, here.get(name))}


def _fits(tensor: Tensor, live: Any) -> bool:
    return isinstance(live, Tensor) and live.shape == tensor.shape


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


def _grouped_otherwise(target: Stateful, state: Any) -> str:
    """Why an optimizer cannot take a state by number; an empty string if it can, or is none."""
    if not hasattr(target, "param_groups"):
        return ""
    try:
        saved = [len(group["params"]) for group in state["param_groups"]]
    except (KeyError, TypeError, IndexError):
        return f"is no optimizer's state, for {type(target).__name__}"
    here = [len(group["params"]) for group in target.param_groups]
    return "" if saved == here else f"groups of {saved} parameters, {type(target).__name__} has groups of {here}"


def _tell_unread(directory: Path, used: Collection[str]) -> None:
    names = sorted(path.name for path in directory.iterdir() if _STATE.fullmatch(path.name))
    if unread := [name for name in names if name not in used]:
        logger.info("%s also holds %s, left unread", directory, ", ".join(unread))


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
