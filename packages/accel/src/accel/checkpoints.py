"""What an Accelerator saves, under which names, and where."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accel_ckpt
import accel_parallel
from accel_state import gather_object, warn_user
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, SettingError
from accel_state.protocols import Stateful

from .torch_files import beside_torch_files, load_beside_torch_files, load_torch_files, torch_files

if TYPE_CHECKING:
    from torch import nn

    from accel_ckpt import Checkpointer, SaveHandle

    from .accelerator import Accelerator

PREFIX = "checkpoint_"


class Counters:
    """The Accelerator's own numbers as part of a checkpoint."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        """Micro-batches so far."""
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Count on from there."""
        self._accelerator.step = int(state["step"])


def everything(accelerator: Accelerator) -> dict[str, Any]:
    """Name to object of all that a checkpoint holds, in the order in which it is loaded.

    Names are the class's and an ordinal, so that they stay when other objects come or go.
    """
    registry = accelerator.registry
    prepared = accel_parallel.Prepared(
        models=tuple(registry.models), optimizers=tuple(registry.optimizers), schedulers=tuple(registry.schedulers)
    )
    objects: dict[str, Any] = dict(accelerator.engine.state(prepared))
    seen: Counter[str] = Counter()
    for item in (*registry.dataloaders, *registry.custom_objects):
        kind = type(item).__name__
        name = f"{kind}-{seen[kind]}"
        seen[kind] += 1
        objects[name if name not in objects else f"registered-{name}"] = item
    return {**objects, "trackers": accelerator.tracker_set, "accelerator": Counters(accelerator)}


def refuse_torch_files(models: Iterable[Any]) -> None:
    """Refuse the peer's files, which hold whole tensors and number parameters, where ranks have parts of models.

    Raises:
        CheckpointError: there is a model that is sharded or pipelined.
    """
    if any(accel_parallel.is_spread(model) for model in models):
        raise CheckpointError(
            "the peer's files cannot be written or read where models are sharded or pipelined: no rank has all that is "
            "in them. Way out: save_state() without safe_serialization=False, and `accel ckpt convert`; to read "
            "theirs, load them on one process, save_state() there, and load that"
        )


def checked(objects: Sequence[Any]) -> Sequence[Any]:
    """The objects, all of which can be saved and loaded.

    Raises:
        SettingError: names every one that cannot.
    """
    wrong = [
        f"{item!r} ({type(item).__name__})"
        for item in objects
        if isinstance(item, type) or not isinstance(item, Stateful)
    ]
    if wrong:
        raise SettingError(
            "register_for_checkpointing takes objects with state_dict() and load_state_dict(); these lack them: "
            + ", ".join(wrong)
        )
    return objects


def save_state(
    accelerator: Accelerator,
    output_dir: str | os.PathLike[str] | None,
    safe_serialization: bool,
    blocking: bool,
    function_kwargs: Mapping[str, Any],
) -> str | SaveHandle:
    """Save `everything`; see `Accelerator.save_state`."""
    if function_kwargs:
        raise SettingError(
            f"save_state() got {', '.join(function_kwargs)}, which nothing takes: safetensors and JSON are written "
            "without options"
        )
    project = accelerator.project_configuration
    if not accelerator.sync_gradients:
        warn_user(
            "save_state() within an accumulation window: gradients are not saved, so a resumed run begins the window "
            "anew and is not bit-exact. Save when sync_gradients is true.",
            RuntimeWarning,
        )
    objects = everything(accelerator)
    before_write = accelerator.state_hooks.before_write(objects)
    options: dict[str, Any] = {"before_write": before_write}
    if not safe_serialization:
        refuse_torch_files(accelerator.registry.models)
        options = {"before_commit": torch_files(accelerator, objects, before_write)}
        objects = beside_torch_files(objects)
    if not project.automatic_checkpoint_naming:
        if output_dir is None:
            raise CheckpointError(
                "save_state() needs output_dir, or ProjectConfiguration(project_dir=..., "
                "automatic_checkpoint_naming=True), which names checkpoints by itself"
            )
        wait_for_saves(accelerator)
        options["save_on_each_node"] = project.save_on_each_node
        if blocking:
            return os.fspath(accel_ckpt.save_checkpoint(output_dir, objects, **options))
        handle = accel_ckpt.save_in_background(output_dir, objects, buffers=accelerator.copy_buffers, **options)
        accelerator.registry.pending_saves.append(handle)
        return handle
    if output_dir is not None:
        warn_user(
            f"output_dir={os.fspath(output_dir)!r} is not used: automatic_checkpoint_naming chooses the directory",
            RuntimeWarning,
        )
    checkpointer = _automatic(accelerator)
    free = _next_number(accelerator, checkpointer.directory)
    if project.iteration < free:  # the highest number is the newest: one below would never be found again
        raise CheckpointError(
            f"{checkpointer.directory} holds checkpoints up to {PREFIX}{free - 1} of an earlier run: load_state() "
            "first to continue that run, choose another project_dir, or set project_configuration.iteration to "
            f"{free} or more"
        )
    saved = checkpointer.save(project.iteration, blocking=blocking, **options, **objects)
    project.iteration += 1
    return saved if isinstance(saved, accel_ckpt.SaveHandle) else os.fspath(saved)


def save_model(
    accelerator: Accelerator,
    model: nn.Module,
    directory: str | os.PathLike[str],
    max_shard_size: int | str,
    safe_serialization: bool,
) -> None:
    """Write a model's weights for any reader; those of a sharded or pipelined one are gathered on rank 0 before.

    Raises:
        CheckpointError: it could not be written, or each node should write what rank 0 alone has.
    """
    accel_ckpt.save_model(
        accel_parallel.inner_model(model),
        directory,
        max_shard_size,
        safe_serialization,
        save_on_each_node=accelerator.project_configuration.save_on_each_node,
        weights=accel_parallel.full_state_dict(model),
    )


def wait_for_saves(accelerator: Accelerator) -> None:
    """Wait for saves that go on in the background. Every rank calls it.

    Raises:
        CheckpointError: one failed.
    """
    pending = accelerator.registry.pending_saves
    while pending:
        pending.pop(0).wait()
    for checkpointer in accelerator.registry.checkpointers.values():
        checkpointer.wait()


def load_state(
    accelerator: Accelerator,
    input_dir: str | os.PathLike[str] | None,
    strict: bool,
    load_kwargs: Mapping[str, Any] | None,
    function_kwargs: Mapping[str, Any],
) -> None:
    """Load `everything`; see `Accelerator.load_state`."""
    _check_load_options(load_kwargs or {}, function_kwargs)
    project = accelerator.project_configuration
    wait_for_saves(accelerator)
    if input_dir is not None:
        _load_directory(accelerator, strict, input_dir)
    elif project.automatic_checkpoint_naming:
        _automatic(accelerator).load_newest(partial(_load_directory, accelerator, strict))
    else:
        raise CheckpointNotFoundError(
            "load_state() without a directory finds the newest checkpoint only with ProjectConfiguration("
            "project_dir=..., automatic_checkpoint_naming=True): pass the checkpoint's directory"
        )
    if project.automatic_checkpoint_naming and project.project_dir is not None:
        project.iteration = max(project.iteration, _next_number(accelerator, _automatic(accelerator).directory))
    _begin_anew(accelerator)


def _load_directory(accelerator: Accelerator, strict: bool, directory: str | os.PathLike[str]) -> None:
    """Load one checkpoint, whoever wrote it in whichever form."""
    objects, kind = everything(accelerator), _agreed(accelerator, _kind_of(directory), directory)
    if "accelerate" in kind or "torch files" in kind:
        refuse_torch_files(accelerator.registry.models)
    if kind == "accelerate":
        load_torch_files(accelerator, directory, strict)
    elif kind == "ours with torch files":
        load_beside_torch_files(accelerator, directory, beside_torch_files(objects), strict)
    else:
        before_load = accelerator.state_hooks.before_load(objects)
        accel_ckpt.load_checkpoint(directory, objects, strict=strict, before_load=before_load)
        accel_parallel.write_back(objects.values())


def _kind_of(directory: str | os.PathLike[str]) -> str:
    theirs, ours = accel_ckpt.is_accelerate_checkpoint(directory), accel_ckpt.is_committed_checkpoint(directory)
    if theirs:
        return "ours with torch files" if ours else "accelerate"
    return "ours" if ours else "no checkpoint"


def _agreed(accelerator: Accelerator, kind: str, directory: str | os.PathLike[str]) -> str:
    """What every rank finds there.

    Raises:
        CheckpointCorruptError: on all ranks: they find different things.
    """
    kinds = gather_object([kind]) if accelerator.num_processes > 1 else [kind]
    if odd := [f"rank {rank}: {found}" for rank, found in enumerate(kinds) if found != kinds[0]]:
        raise CheckpointCorruptError(
            f"the ranks find different things at {os.fspath(directory)} (rank 0: {kinds[0]}; {'; '.join(odd[:4])}): "
            "every rank needs the whole checkpoint, on a common file system or saved with save_on_each_node=True"
        )
    return kind


def _check_load_options(load_kwargs: Mapping[str, Any], function_kwargs: Mapping[str, Any]) -> None:
    """Take the options that hold anyway, and refuse all others.

    Raises:
        SettingError: names each option that cannot be honoured.
    """
    holds: dict[str, Sequence[Any]] = {"map_location": (None, "cpu", "on_device"), "weights_only": (True,)}
    wrong = [
        f"{name}={value!r}" + (f" (allowed: {', '.join(map(repr, holds[name]))})" if name in holds else " (unknown)")
        for name, value in (*load_kwargs.items(), *function_kwargs.items())
        if not any(value is option or value == option for option in holds.get(name, ()))
    ]
    if wrong:
        raise SettingError(
            f"load_state() cannot honour {', '.join(wrong)}. Files are mapped into host memory, each tensor is copied "
            "to where its object has it, and nothing is unpickled."
        )


def _begin_anew(accelerator: Accelerator) -> None:
    """What a fresh process would find after loading: no gradients, and accumulation windows at their beginning."""
    for model in accelerator.registry.models:
        for parameter in model.parameters():
            parameter.grad = None
    accelerator.accumulation.reset()


def _next_number(accelerator: Accelerator, directory: Path) -> int:
    """One above every checkpoint that any rank sees, the damaged ones that were passed over included."""
    paths = directory.iterdir() if directory.is_dir() else ()
    numbers = [path.name.removeprefix(PREFIX) for path in paths if path.name.startswith(PREFIX)]
    free = 1 + max((int(number) for number in numbers if number.isdigit()), default=-1)
    return max(gather_object([free])) if accelerator.num_processes > 1 else free


def _automatic(accelerator: Accelerator) -> Checkpointer:
    """The directory of automatically named checkpoints.

    Raises:
        SettingError: there is no project directory.
    """
    project = accelerator.project_configuration
    if project.project_dir is None:
        raise SettingError("automatic_checkpoint_naming needs a project_dir in ProjectConfiguration or Accelerator")
    directory = Path(project.project_dir) / "checkpoints"
    checkpointer = accelerator.registry.checkpointers.setdefault(
        directory,
        accel_ckpt.Checkpointer(directory, prefix=PREFIX, save_on_each_node=project.save_on_each_node),
    )
    checkpointer.keep = None if project.total_limit is None else accel_ckpt.latest(project.total_limit)
    return checkpointer
