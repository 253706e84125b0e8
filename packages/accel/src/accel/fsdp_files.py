"""Sharded models and their optimizers as directories of their own: the peer's four functions, which clients call.

Each is a checkpoint of accel's, named as the peer names it: it loads on any number of ranks, without unpickling.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accel_ckpt
import accel_parallel
from accel_state.errors import CheckpointNotFoundError, SettingError

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.modules.module import _IncompatibleKeys

    from .accelerator import Accelerator

MODEL_DIRECTORY = "pytorch_model_fsdp"
OPTIMIZER_DIRECTORY = "optimizer"


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,  # noqa: ARG001  the peer's: both of its forms are one here
) -> None:
    """Write a prepared model's weights into `output_dir/pytorch_model_fsdp_<index>`. Every rank calls it.

    Each rank writes its shards. With `state_dict_type="FULL_STATE_DICT"` rank 0 also writes `pytorch_model_fsdp.bin`,
    all weights in torch's format for other readers, which `load_fsdp_model` leaves alone.

    Args:
        fsdp_plugin: the Accelerator's; its `state_dict_type` counts.
        accelerator: prepared the model.
        model: as prepared.
        output_dir: made if it is not there; other files in it stay.
        model_index: tells several models in one directory apart.
        adapter_only: of a peft model, only the weights that are trained.
        use_dcp: makes no difference.

    Raises:
        SettingError: there is no plugin.
        CheckpointError: on all ranks: it could not be written; what was there before still is.

    Cost: as of `accel_ckpt.save_checkpoint`; with FULL_STATE_DICT also an all-gather of each tensor.
    """
    _require_plugin("save_fsdp_model", fsdp_plugin)
    objects = _objects(accelerator, model)
    only = _adapter(model) if adapter_only else None
    before_write = None
    if only is not None:
        (name,) = objects
        state = objects[name].state_dict()
        before_write = lambda _path: {name: {key: value for key, value in state.items() if key in only}}  # noqa: E731
    directory = Path(output_dir)
    accel_ckpt.save_checkpoint(
        directory / f"{MODEL_DIRECTORY}_{model_index}", objects, rng=False, before_write=before_write
    )
    if fsdp_plugin.state_dict_type.name == "FULL_STATE_DICT":
        weights = accel_parallel.full_state_dict(model)
        if only is not None:
            weights = {key: value for key, value in weights.items() if key in only}
        suffix = f"_{model_index}" if model_index else ""
        accelerator.save(weights, directory / f"{MODEL_DIRECTORY}{suffix}.bin")
        accelerator.wait_for_everyone()


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,  # noqa: ARG001
) -> _IncompatibleKeys:
    """Load what `save_fsdp_model` wrote, on any number of ranks, into a prepared model. Every rank calls it.

    Args:
        fsdp_plugin, accelerator, model, model_index, use_dcp: as of `save_fsdp_model`.
        input_dir: what was `output_dir`.
        adapter_only: of a peft model, only the weights that are trained; others keep their values.

    Returns:
        torch's answer of `load_state_dict`, whose lists of missing and unexpected names are empty.

    Raises:
        SettingError: there is no plugin.
        CheckpointNotFoundError: accel wrote no such checkpoint there.
        CheckpointMismatchError: it is of another model; lists the differences.
    """
    from torch.nn.modules.module import _IncompatibleKeys

    _require_plugin("load_fsdp_model", fsdp_plugin)
    directory = _found(Path(input_dir) / f"{MODEL_DIRECTORY}_{model_index}")
    objects = _objects(accelerator, model)
    partly = adapter_only and _adapter(model) is not None
    accel_ckpt.load_checkpoint(directory, objects, rng=False, strict=not partly)
    accel_parallel.write_back(objects.values())
    return _IncompatibleKeys([], [])


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,  # noqa: ARG001
) -> None:
    """Write an optimizer's state into `output_dir/optimizer_<index>`, by its model's names. Every rank calls it.

    Args:
        fsdp_plugin, accelerator, output_dir, use_dcp: as of `save_fsdp_model`.
        optimizer: as prepared.
        model: whose parameters it trains; nothing of it is written.
        optimizer_index: tells several optimizers in one directory apart.

    Raises:
        SettingError, CheckpointError: as of `save_fsdp_model`.
    """
    _require_plugin("save_fsdp_optimizer", fsdp_plugin)
    objects = _objects(accelerator, model, optimizer)
    (name, *_) = objects
    directory = Path(output_dir) / f"{OPTIMIZER_DIRECTORY}_{optimizer_index}"
    accel_ckpt.save_checkpoint(directory, objects, rng=False, before_write=lambda _path: {name: None})


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,  # noqa: ARG001  the optimizer has no more than its model trains
    use_dcp: bool = True,  # noqa: ARG001
) -> None:
    """Load what `save_fsdp_optimizer` wrote, on any number of ranks. Every rank calls it.

    Args:
        fsdp_plugin, accelerator, use_dcp: as of `save_fsdp_model`.
        optimizer, model, optimizer_index: as of `save_fsdp_optimizer`.
        input_dir: what was `output_dir`.
        adapter_only: makes no difference.

    Raises:
        SettingError, CheckpointNotFoundError, CheckpointMismatchError: as of `load_fsdp_model`.
    """
    _require_plugin("load_fsdp_optimizer", fsdp_plugin)
    directory = _found(Path(input_dir) / f"{OPTIMIZER_DIRECTORY}_{optimizer_index}")
    objects = _objects(accelerator, model, optimizer)
    (name, *_) = objects
    accel_ckpt.load_checkpoint(directory, objects, rng=False, before_load=lambda _path: [name])
    accel_parallel.write_back(objects.values())


def _require_plugin(caller: str, fsdp_plugin: Any) -> None:
    if not isinstance(fsdp_plugin, accel_parallel.FullyShardedDataParallelPlugin):
        raise SettingError(
            f"{caller} takes the Accelerator's FullyShardedDataParallelPlugin, and got {fsdp_plugin!r}: without one "
            "use save_state and load_state"
        )


def _objects(accelerator: Accelerator, *prepared: Any) -> dict[str, Any]:
    """The model, and its optimizer, under names that do not depend on what else was prepared."""
    model, *optimizers = prepared
    held = accelerator.engine.state(accel_parallel.Prepared(models=(model,), optimizers=tuple(optimizers)))
    return dict(zip(("model", "optimizer"), held.values(), strict=False))


def _adapter(model: nn.Module) -> frozenset[str] | None:
    """Names of the weights that a peft model trains; None for other models."""
    if not accel_parallel.is_peft_model(model):
        return None
    bare = accel_parallel.inner_model(model)
    return frozenset(name for name, parameter in bare.named_parameters() if parameter.requires_grad)


def _found(directory: Path) -> Path:
    if accel_ckpt.is_committed_checkpoint(directory):
        return directory
    hint = " `accel merge-weights` makes one file of it, to be loaded before prepare()." if directory.is_dir() else ""
    raise CheckpointNotFoundError(f"{directory} is no checkpoint that accel wrote.{hint}")
