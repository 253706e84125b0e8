"""Checkpoints loaded into models that may be larger than any one device.

accel-ckpt streams the tensors, accel-parallel says where each goes. What goes to the CPU stays a private view of the
file, read as it is used; what goes to an accelerator is copied there from the file, a tensor at a time; what goes to
disk stays in its safetensors file, and is written to the offload folder only if it has another form or dtype there.

Host memory: none for safetensors files beyond one tensor that changes its dtype; a whole file for torch's.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accel_ckpt import locate_weights, read_weights
from accel_parallel import (
    check_device_map,
    dispatch_model,
    find_tied_parameters,
    get_balanced_memory,
    get_non_persistent_buffers,
    infer_auto_device_map,
    offload_weight,
    save_offload_index,
    set_module_tensor_to_device,
)
from accel_state.errors import AccelError, CheckpointMismatchError, DeviceMapError, SettingError

_log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)
Path_ = str | os.PathLike[str]
_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: Path_,
    device_map: Mapping[str, Any] | None = None,
    offload_folder: Path_ | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load weights into a model, each tensor straight to where it belongs.

    Tensors on the meta device are replaced; those with memory on the right device, and of the right dtype, are filled
    in place, so that optimizers keep them. Tied weights stay tied, whichever of their names the files have.

    Args:
        model: with tensors anywhere, the meta device too.
        checkpoint: a safetensors or torch file, an index, or a folder with either; torch's are read weights-only.
        device_map: name of a module or tensor -> device; None loads each tensor where it is, and to the CPU from meta.
        offload_folder: for the index of weights on disk, and their files where they change.
        dtype: of floating-point weights; None keeps the model's.
        offload_state_dict: not needed to save memory, since files are mapped.
        offload_buffers: whether buffers of modules on disk stay there too; else they go to the CPU.
        keep_in_fp32_modules: names, or parts between dots, of modules that stay float32 with a half-precision `dtype`.
        offload_8bit_bnb: of quantised models, which are not offered.
        strict: whether missing and unexpected names are an error; else they are logged.
        full_state_dict: of models with DTensors: the files hold whole tensors, not this rank's shards.
        broadcast_from_rank0: rank 0 alone reads the files and sends the tensors to the other ranks, which all call
            this; without a device map.

    Raises:
        CheckpointMismatchError: shapes differ, or `strict` and names do; lists all differences.
        CheckpointNotFoundError, CheckpointCorruptError: nothing to read there, or it is damaged.
        DeviceMapError: the map misses parameters, or has "disk" without an offload_folder.
        SettingError: arguments that contradict each other.
    """
    del offload_state_dict
    _load(
        model,
        checkpoint,
        _Target(
            model=model,
            device_map=device_map,
            offload_folder=offload_folder,
            dtype=_dtype(dtype),
            offload_buffers=offload_buffers,
            keep_in_fp32=tuple(keep_in_fp32_modules or ()),
        ),
        offload_8bit_bnb=offload_8bit_bnb,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )


def load_checkpoint_and_dispatch(
    model: Model,
    checkpoint: Path_,
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    offload_folder: Path_ | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> Model:
    """Load weights into a model and attach the hooks that let it run where they lie.

    Args:
        model: usually made under `init_empty_weights()`.
        device_map: a map; or "auto" and "balanced", which fill accelerators evenly, "balanced_low_0", which leaves the
            first one free where it can, "sequential", which fills one after the other. None loads without dispatching.
        max_memory, no_split_module_classes: of `infer_auto_device_map`.
        skip_keys, preload_module_classes, force_hooks: of `dispatch_model`.
        checkpoint, offload_folder, offload_buffers, dtype, offload_state_dict, strict, full_state_dict,
            broadcast_from_rank0: of `load_checkpoint_in_model`.

    Returns:
        The model, changed in place.

    Raises:
        DeviceMapError: an unknown strategy.
        OffloadError: the files lack weights that the model has no numbers of either; lists them.
        CheckpointError, SettingError: as `load_checkpoint_in_model`.
    """
    del offload_state_dict
    if isinstance(device_map, str):
        if device_map not in _STRATEGIES:
            raise DeviceMapError(
                f"device_map={device_map!r}: If passing a string for `device_map`, please choose 'auto', 'balanced', "
                "'balanced_low_0' or 'sequential'."
            )
        if device_map != "sequential":
            low_zero = device_map == "balanced_low_0"
            max_memory = get_balanced_memory(model, max_memory, no_split_module_classes, dtype, low_zero=low_zero)
        device_map = infer_auto_device_map(
            model, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
    target = _Target(
        model=model,
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=_dtype(dtype),
        offload_buffers=offload_buffers,
    )
    _load(
        model,
        checkpoint,
        target,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_index=target.index or None,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if (found is not None and not isinstance(found, torch.dtype)) or (dtype is not None and found is None):
        raise SettingError(f"dtype={dtype!r} is none of torch's: give torch.float16, or its name")
    return found


@dataclass(kw_only=True)
class _Target:
    """A model that takes tensors one after the other.

    Attributes:
        index: entries of weights that stay on disk.
        done: names that were taken.
        unexpected, misshapen: what did not fit.
    """

    model: nn.Module
    device_map: Mapping[str, Any] | None
    offload_folder: Path_ | None
    dtype: torch.dtype | None
    offload_buffers: bool
    keep_in_fp32: tuple[str, ...] = ()
    files: Mapping[str, tuple[Path, str]] = field(default_factory=dict)
    index: dict[str, Any] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tensors = _state(self.model)
        self._names = list(self._tensors)
        self.tied = find_tied_parameters(self.model)
        self._group = {name: index for index, names in enumerate(self.tied) for name in names}
        self._filled: set[tuple[int, str]] = set()

    def take(self, name: str, value: Tensor) -> None:
        """The `place` of `read_weights`."""
        old = self._tensors.pop(name, None)
        if old is None:
            self.unexpected.append(name)
            return
        if old.shape != value.shape:
            self.misshapen.append(f"{name} is {tuple(value.shape)} in the files and {tuple(old.shape)} in the model")
            return
        self.done.add(name)
        where = self.place_of(name)
        key = (self._group.get(name, -1), str(where))
        if key[0] >= 0 and key in self._filled:
            return  # another name of a tied weight, which is tied again at the end
        self._filled.add(key)
        dtype = self.dtype_of(name, old)
        others = [] if key[0] < 0 else [n for n in self.tied[key[0]] if n != name and self.place_of(n) == where]
        if where == "disk":
            self._keep_on_disk(name, others, old, value, dtype)
        elif not old.is_meta and (where is None or torch.device(where) == old.device) and old.dtype == dtype:
            with torch.no_grad():
                old.copy_(value)
        else:
            device = where if where is not None else "cpu" if old.is_meta else old.device
            set_module_tensor_to_device(self.model, name, device, value=value, dtype=dtype)
        for other in others:
            _tie(self.model, other, name)

    def place_of(self, name: str) -> Any:
        """The device that the map gives; None without a map."""
        if self.device_map is None:
            return None
        while name not in self.device_map:
            name = name.rpartition(".")[0]
        return self.device_map[name]

    def dtype_of(self, name: str, old: Tensor) -> torch.dtype:
        """The dtype that a weight gets."""
        if self.dtype is None or not old.dtype.is_floating_point:
            return old.dtype
        parts = name.split(".")
        is_half = self.dtype in (torch.float16, torch.bfloat16)
        if is_half and any(kept in parts or name.startswith(f"{kept}.") for kept in self.keep_in_fp32):
            return torch.float32
        return self.dtype

    def _keep_on_disk(self, name: str, tied: list[str], old: Tensor, value: Tensor, dtype: torch.dtype) -> None:
        if not isinstance(old, nn.Parameter) and not self.offload_buffers:
            set_module_tensor_to_device(self.model, name, "cpu", value=value, dtype=dtype)
            return
        set_module_tensor_to_device(self.model, name, "meta", dtype=dtype)
        assert self.offload_folder is not None
        if name in self.files and value.dtype == dtype:
            file, stored_name = self.files[name]
            entry = {
                "safetensors_file": str(file.resolve()),
                "weight_name": stored_name,
                "dtype": str(dtype).removeprefix("torch."),
                "shape": list(value.shape),
            }
            self.index |= dict.fromkeys([name, *tied], entry)
        else:
            for each in (name, *tied):
                offload_weight(value.to(dtype), each, self.offload_folder, self.index)

    def finish(self, checkpoint: Path_, strict: bool) -> None:
        """The index; then what did not fit."""
        if self.index and self.offload_folder is not None:
            save_offload_index(self.index, self.offload_folder)
        covered = {self._group[name] for name in self.done if name in self._group}
        missing = [name for name in self._names if name not in self.done and self._group.get(name) not in covered]
        _report(type(self.model).__name__, checkpoint, missing, self.unexpected, self.misshapen, strict)


def _tie(model: nn.Module, name: str, first: str) -> None:
    """Give one name the parameter that another one has."""
    path, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(path), own_name, model.get_parameter(first))


def _state(model: nn.Module) -> dict[str, Tensor]:
    """What a state dict has, by every name: parameters and persistent buffers."""
    left_out = get_non_persistent_buffers(model, recurse=True, fqns=True)
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found |= {name: t for name, t in model.named_buffers(remove_duplicate=False) if name not in left_out}
    return found


def _report(
    model: str,
    checkpoint: Path_,
    missing: Sequence[str],
    unexpected: Sequence[str],
    misshapen: Sequence[str],
    strict: bool,
) -> None:
    lines = []
    if missing:
        lines.append(f"Missing key(s), which {model} has and the files lack: {_listed(missing)}.")
    if unexpected:
        lines.append(f"Unexpected key(s), which the files have and {model} lacks: {_listed(unexpected)}.")
    if misshapen or (strict and lines):
        lines += [f"{text}." for text in misshapen[:10]]
        raise CheckpointMismatchError(
            f"{checkpoint} does not fit {model}. "
            + " ".join(lines)
            + " Build the model by the configuration that the weights were saved with"
            + ("." if misshapen else ", or pass strict=False.")
        )
    if lines:
        _log.warning("%s was loaded in part. %s", checkpoint, " ".join(lines))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:10])
    return shown + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _load(
    model: nn.Module,
    checkpoint: Path_,
    target: _Target,
    *,
    offload_8bit_bnb: bool = False,
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> None:
    if offload_8bit_bnb:
        raise SettingError(
            "offload_8bit_bnb=True is for models that bitsandbytes quantised, which accel does not offer"
        )
    if target.device_map is None and (broadcast_from_rank0 or _is_sharded(model)):
        _load_distributed(model, checkpoint, strict, full_state_dict, broadcast_from_rank0)
        return
    if broadcast_from_rank0:
        raise SettingError("broadcast_from_rank0=True sends tensors to where the model has them: pass no device_map")
    if target.device_map is not None:
        check_device_map(model, target.device_map)
        if "disk" in target.device_map.values():
            if target.offload_folder is None:
                raise DeviceMapError(
                    "At least one of the model submodule will be offloaded to disk, please pass along an "
                    "`offload_folder`."
                )
            target.files = locate_weights(checkpoint)
    read_weights(checkpoint, target.take)
    target.finish(checkpoint, strict)


def _is_sharded(model: nn.Module) -> bool:
    """Whether it has DTensors, whose module is not imported to find that out: it takes seconds."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in model.parameters())


def _load_distributed(
    model: nn.Module, checkpoint: Path_, strict: bool, full_state_dict: bool, broadcast_from_rank0: bool
) -> None:
    """By torch's own function, which knows how sharded tensors lie. Every rank ends with rank 0's error."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    from accel_state import broadcast_object_list

    if broadcast_from_rank0 and not (dist.is_available() and dist.is_initialized()):
        raise SettingError(
            "broadcast_from_rank0=True needs the ranks of a job: start it by a launcher, or leave it out"
        )
    state: dict[str, Tensor] = {}
    failure: list[Any] = [None]
    if not broadcast_from_rank0 or dist.get_rank() == 0:
        try:
            read_weights(checkpoint, state.__setitem__)
        except AccelError as error:
            failure = [error]
    if broadcast_from_rank0:
        broadcast_object_list(failure)
    if failure[0] is not None:
        raise failure[0]
    options = StateDictOptions(
        full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=strict
    )
    set_model_state_dict(model, dict[str, Any](state), options=options)
