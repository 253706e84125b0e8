"""The peer's functions that save and load one model or optimizer under FSDP, in the form that its plugin names.

FULL_STATE_DICT is a file of torch's with everything in it, SHARDED_STATE_DICT a directory in the format of
torch.distributed.checkpoint, both under the peer's names. Either is read on any number of ranks and under either
version, and nothing in them is run. `save_state` needs none of this: it has a form of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

import accel_ckpt
import accel_parallel
from accel_state.errors import SettingError

if TYPE_CHECKING:
    from accel_parallel import FullyShardedDataParallelPlugin

    from .accelerator import Accelerator

_MODEL_FILE = "pytorch_model_fsdp"
_OPTIMIZER_FILE = "optimizer"


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save a sharded model's weights: `pytorch_model_fsdp.bin`, or the directory `pytorch_model_fsdp_<index>`.

    Args:
        fsdp_plugin: its `state_dict_type` names the form.
        adapter_only: of a PEFT model only the weights that it trains; without effect on others.
        use_dcp: False is refused for the sharded form, which has no other format.

    Raises:
        SettingError: a form that other world sizes could not read.
        CheckpointError: on all ranks: what could not be written.

    Cost: writes the weights once; the full form gathers them on rank 0's host memory.
    """
    full = _is_full(fsdp_plugin, use_dcp)
    state = accelerator.get_state_dict(model) if full else get_model_state_dict(_sharded_root(model))
    if wanted := _adapter_names(model, adapter_only):
        state = {name: value for name, value in state.items() if name in wanted}
    _save({"model": state}, state, Path(output_dir), _MODEL_FILE, model_index, full)


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,  # noqa: ARG001 - the peer's parameter
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load what `save_fsdp_model` wrote, on any number of ranks.

    Args:
        fsdp_plugin, adapter_only, use_dcp: as there.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError: on all ranks: none there; damaged, or it would run code.
        CheckpointError, RuntimeError: it does not fit the model.
    """
    full, inner, root = _is_full(fsdp_plugin, use_dcp), _sharded_root(model), Path(input_dir)
    wanted = _adapter_names(model, adapter_only)
    if full:
        state = accel_ckpt.load_whole(root / _file(_MODEL_FILE, model_index))
    else:
        state = get_model_state_dict(inner)
        state = {name: value for name, value in state.items() if not wanted or name in wanted}
        accel_ckpt.load_dcp({"model": state}, root / f"{_MODEL_FILE}_{model_index}")
    set_model_state_dict(inner, state, options=_options(full, strict=not wanted))


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,  # noqa: ARG001 - the peer's parameter
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save a sharded optimizer's state by parameter name: `optimizer.bin`, or the directory `optimizer_<index>`.

    Args, Raises, Cost: as `save_fsdp_model`.
    """
    full = _is_full(fsdp_plugin, use_dcp)
    state = get_optimizer_state_dict(_sharded_root(model), _bare(optimizer), options=_options(full))
    _save({"optimizer": state}, state, Path(output_dir), _OPTIMIZER_FILE, optimizer_index, full)


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,  # noqa: ARG001 - the peer's parameter
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,  # noqa: ARG001 - the peer's parameter: an optimizer has only what it trains
    use_dcp: bool = True,
) -> None:
    """Load what `save_fsdp_optimizer` wrote, on any number of ranks.

    Args, Raises: as `load_fsdp_model`.
    """
    full, inner, root = _is_full(fsdp_plugin, use_dcp), _sharded_root(model), Path(input_dir)
    if full:
        state = accel_ckpt.load_whole(root / _file(_OPTIMIZER_FILE, optimizer_index))
    else:
        state = get_optimizer_state_dict(inner, _bare(optimizer), options=_options(full))
        wrapped = {"optimizer": state}
        accel_ckpt.load_dcp(wrapped, root / f"{_OPTIMIZER_FILE}_{optimizer_index}")
        state = wrapped["optimizer"]
    set_optimizer_state_dict(inner, _bare(optimizer), state, options=_options(full))


def _is_full(plugin: FullyShardedDataParallelPlugin, use_dcp: bool) -> bool:
    kind = plugin.state_dict_type
    if kind is StateDictType.LOCAL_STATE_DICT:
        raise SettingError(
            "state_dict_type='LOCAL_STATE_DICT' writes flat pieces that only as many ranks could read again: use "
            "FULL_STATE_DICT or SHARDED_STATE_DICT"
        )
    full = kind is StateDictType.FULL_STATE_DICT
    if not full and not use_dcp:
        raise SettingError("use_dcp=False: SHARDED_STATE_DICT is written with DCP only; use FULL_STATE_DICT without it")
    return full


def _options(full: bool, strict: bool = True) -> StateDictOptions:
    return StateDictOptions(full_state_dict=full, cpu_offload=full, strict=strict)


def _save(tree: dict[str, Any], state: Any, directory: Path, name: str, index: int, full: bool) -> None:
    if full:
        accel_ckpt.save(state, directory / _file(name, index))
    else:
        accel_ckpt.save_dcp(tree, directory / f"{name}_{index}")


def _file(name: str, index: int) -> str:
    return f"{name}.bin" if index == 0 else f"{name}_{index}.bin"


def _sharded_root(model: nn.Module) -> nn.Module:
    """What holds the parameters: version 1's wrapper, or the model without wrappers."""
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            return module
    bare: nn.Module = accel_parallel.extract_model_from_parallel(model, keep_torch_compile=False)
    return bare


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _adapter_names(model: nn.Module, adapter_only: bool) -> set[str]:
    """The weights to save of a PEFT model; empty where all are."""
    bare = accel_parallel.extract_model_from_parallel(model, keep_torch_compile=False)
    if not adapter_only or not hasattr(bare, "peft_config"):
        return set()
    return {name for name, parameter in bare.named_parameters() if parameter.requires_grad}
