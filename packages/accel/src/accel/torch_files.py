"""`save_state(safe_serialization=False)`: the peer's files in torch's format; and loading them, whoever wrote them.

What they have no place for (loaders' positions, trackers, counters) lies beside them in the checkpoint's own form.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
    names: Mapping[int, str],
    before_write: Callable[[Path], Mapping[str, Mapping[str, Any] | None]] | None,
) -> Callable[[Path], None]:
    """What writes the peer's files into a checkpoint before it is committed.

    Args:
        names: of the models, by the identity of the unwrapped ones.
        before_write: the save hooks, which may put others in the place of weights or pop them.
    """

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
        )

    return write


def load_torch_files(accelerator: Accelerator, input_dir: str | os.PathLike[str]) -> None:
    """Load the peer's files, without models that load hooks pop: the others are numbered in their order."""
    registry = accelerator.registry
    models = _bare_models(accelerator)
    if before_load := accelerator.state_hooks.before_load({id(model): str(i) for i, model in enumerate(models)}):
        popped = before_load(Path(input_dir))
        models = [model for i, model in enumerate(models) if str(i) not in popped]
    step = accel_ckpt.load_accelerate_checkpoint(
        input_dir,
        models=models,
        optimizers=[getattr(optimizer, "optimizer", optimizer) for optimizer in registry.optimizers],
        schedulers=[getattr(scheduler, "scheduler", scheduler) for scheduler in registry.schedulers],
        scaler=accelerator.scaler,
        custom_objects=registry.custom_objects,
        process_index=accelerator.process_index,
    )
    accelerator.step = accelerator.step if step is None else step


def _bare_models(accelerator: Accelerator) -> list[nn.Module]:
    return [
        accel_parallel.extract_model_from_parallel(model, keep_torch_compile=False)
        for model in accelerator.registry.models
    ]
