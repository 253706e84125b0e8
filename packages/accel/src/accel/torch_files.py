"""`save_state(safe_serialization=False)`: the peer's files in torch's format; and loading them, whoever wrote them.

What they have no place for (loaders' positions, trackers, counters) lies beside them in the checkpoint's own form.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accel_ckpt
import accel_parallel

if TYPE_CHECKING:
    from torch import nn

    from .accelerator import Accelerator


def beside_torch_files(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Of all that a checkpoint holds, what torch files have no place for."""
    import accel_data

    own = ("trackers", "accelerator")
    return {
        name: value
        for name, value in objects.items()
        if name in own or isinstance(value, accel_data.DataLoaderShard | accel_data.DataLoaderDispatcher)
    }


def torch_files(
    accelerator: Accelerator,
    objects: Mapping[str, Any],
    before_write: Callable[[Path], Mapping[str, Mapping[str, Any] | None]] | None,
) -> Callable[[Path], None]:
    """What writes the peer's files into a checkpoint before it is committed.

    Args:
        objects: all that is saved, by name.
        before_write: the save hooks, which may put others in the place of weights or pop them.
    """

    names = {id(value): name for name, value in objects.items()}

    def write(path: Path) -> None:
        registry = accelerator.registry
        inner = _bare_models(accelerator)
        instead = before_write(path) if before_write is not None else {}
        states = [instead.get(names[id(model)], model.state_dict()) for model in inner]
        accel_ckpt.write_accelerate_files(
            path,
            models=[state for state in states if state is not None],
            optimizers=[getattr(optimizer, "optimizer", optimizer) for optimizer in registry.optimizers],
            schedulers=[getattr(scheduler, "scheduler", scheduler) for scheduler in registry.schedulers],
            scaler=accelerator.scaler,
            custom_objects=registry.custom_objects,
            step=accelerator.step,
            safe_serialization=False,
            save_on_each_node=accelerator.project_configuration.save_on_each_node,
        )

    return write


def load_torch_files(accelerator: Accelerator, input_dir: str | os.PathLike[str], strict: bool) -> None:
    """Load the peer's files, without models that load hooks pop: the others are numbered in their order."""
    step = accel_ckpt.load_accelerate_checkpoint(
        input_dir, **_places(accelerator), strict=strict, before_load=partial(_popped, accelerator)
    )
    accelerator.step = accelerator.step if step is None else step


def load_beside_torch_files(
    accelerator: Accelerator, input_dir: str | os.PathLike[str], objects: Mapping[str, Any], strict: bool
) -> None:
    """Load a checkpoint of ours with the peer's files in it: all of it is read before anything changes."""
    opened: list[accel_ckpt.AccelerateCheckpoint] = []

    def read(path: Path) -> Sequence[str]:
        left_out, places = _popped(accelerator, path), _places(accelerator)
        places["models"] = [model for i, model in enumerate(places["models"]) if i not in left_out]
        opened[:] = [accel_ckpt.open_accelerate_checkpoint(path, **places, strict=strict)]
        return ()

    accel_ckpt.load_checkpoint(input_dir, objects, strict=strict, before_load=read)
    opened[0].load()


def _popped(accelerator: Accelerator, path: Path) -> list[int]:
    """Call the load hooks; the numbers of the models that they pop."""
    numbered = {str(i): model for i, model in enumerate(_bare_models(accelerator))}
    hooks = accelerator.state_hooks.before_load(numbered)
    return [] if hooks is None else [int(name) for name in hooks(path)]


def _places(accelerator: Accelerator) -> dict[str, Any]:
    """What the peer's files are loaded into."""
    registry = accelerator.registry
    return {
        "models": _bare_models(accelerator),
        "optimizers": [getattr(optimizer, "optimizer", optimizer) for optimizer in registry.optimizers],
        "schedulers": [getattr(scheduler, "scheduler", scheduler) for scheduler in registry.schedulers],
        "scaler": accelerator.scaler,
        "custom_objects": registry.custom_objects,
        "process_index": accelerator.process_index,
    }


def _bare_models(accelerator: Accelerator) -> list[nn.Module]:
    return [accel_parallel.inner_model(model) for model in accelerator.registry.models]
