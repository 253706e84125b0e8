"""Which mesh and which plugin a run has: from arguments, the environment, and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import accel_data
import accel_parallel
from accel_state.errors import PlanError, SettingError
from accel_state.settings import setting

from .configuration import check_type

if TYPE_CHECKING:
    from torch import Tensor

    from accel_parallel import FullyShardedDataParallelPlugin, ParallelismConfig
    from accel_state import AcceleratorState


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was asked for.

    Args:
        config: the mesh; None means all ranks on one data axis.
        fsdp: how parameters are shared; None where they are not.
    """

    config: ParallelismConfig | None
    fsdp: FullyShardedDataParallelPlugin | None


def choose(fsdp_plugin: Any, torch_tp_plugin: Any, parallelism_config: Any, mixed_precision: str) -> Choice:
    """The mesh and the plugin, from arguments or, where there is none, the launcher's variables.

    Args:
        mixed_precision: as resolved; FSDP computes in it unless its plugin says otherwise.

    Raises:
        SettingError: an object of another type, two that contradict each other, or an axis that has no step yet.
    """
    if fsdp_plugin is not None:
        check_type("fsdp_plugin", fsdp_plugin, accel_parallel.FullyShardedDataParallelPlugin)
    elif setting("use_fsdp"):
        fsdp_plugin = accel_parallel.FullyShardedDataParallelPlugin()
    if parallelism_config is not None:
        check_type("parallelism_config", parallelism_config, accel_parallel.ParallelismConfig)
    elif setting("use_parallelism_config"):
        parallelism_config = accel_parallel.ParallelismConfig()
    if torch_tp_plugin is not None:
        check_type("torch_tp_plugin", torch_tp_plugin, accel_parallel.TorchTensorParallelPlugin)
        parallelism_config = _from_tp_plugin(torch_tp_plugin.tp_size, parallelism_config)
    if parallelism_config is not None:
        if parallelism_config.pp_enabled and (parallelism_config.cp_enabled or parallelism_config.sp_enabled):
            raise SettingError(
                f"parallelism_config with pp_size={parallelism_config.pp_size} and a shared sequence (cp or sp): "
                "stages of a pipeline exchange whole micro-batches. Set cp_size and sp_size to 1, or pp_size to 1"
            )
        if parallelism_config.sp_enabled and parallelism_config.sp_backend == "deepspeed":
            raise SettingError(
                "parallelism_config with sp_backend='deepspeed': DeepSpeed's engine does not exist yet. Way out: "
                "sp_backend='native', which shares sequences in the same way"
            )
        if parallelism_config.pp_enabled and mixed_precision == "fp8":
            raise SettingError(
                f"mixed_precision='fp8' with pp_size={parallelism_config.pp_size}: transformer-engine "
                "agrees on scales over all ranks as if each had the same layers, and torchao's were not shown to "
                "be right inside stages. Use 'bf16' or 'fp16'"
            )
        fsdp_plugin = _with_sharding(fsdp_plugin, parallelism_config)
    if fsdp_plugin is not None and mixed_precision in ("fp16", "bf16") and fsdp_plugin.mixed_precision_policy is None:
        fsdp_plugin = _computing_in(fsdp_plugin, mixed_precision)
    _refuse_what_has_no_step(fsdp_plugin, parallelism_config, mixed_precision)
    return Choice(config=parallelism_config, fsdp=fsdp_plugin)


def _refuse_what_has_no_step(plugin: Any, config: Any, mixed_precision: str) -> None:
    """Refuse what is asked for beside sharding and has not been built."""
    if plugin is not None and plugin.activation_checkpointing_offload and not plugin.activation_checkpointing:
        raise SettingError(
            "fsdp_plugin with activation_checkpointing_offload=True says where checkpointed activations go, and "
            "activation_checkpointing is False: set both, or neither"
        )
    if mixed_precision == "fp8" and (plugin is not None or (config is not None and config.tp_enabled)):
        raise SettingError(
            "mixed_precision='fp8' beside FSDP or tensor parallelism: 8-bit layers were not shown to be right once "
            "they are sharded. Use 'bf16', or DistributedDataParallel"
        )


def _computing_in(plugin: FullyShardedDataParallelPlugin, precision: str) -> FullyShardedDataParallelPlugin:
    """A copy that computes and reduces in this precision; what leaves the model is converted by the autocast step."""
    plugin = copy.copy(plugin)
    plugin.set_mixed_precision(precision)
    if plugin.fsdp_version == 2:
        plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)
    return plugin


def hides_overflows(choice: Choice) -> bool:
    """Whether plain gradients differ between ranks, so that one rank's overflow is not in those of the others."""
    is_pipelined = choice.config is not None and choice.config.pp_enabled
    return is_pipelined or (choice.fsdp is not None and choice.fsdp.fsdp_version == 1)


def build_mesh(config: ParallelismConfig | None, state: AcceleratorState) -> Any:
    """The mesh over this run's ranks, or None without a configuration.

    Raises:
        PlanError: the sizes do not fit the number of ranks.
    """
    if config is None:
        return None
    complaints = config.check(state.num_processes)
    if complaints:
        raise PlanError("parallelism_config does not fit this run: " + " ".join(complaints))
    return config.get_device_mesh(state.device.type) if config.total_size > 1 else None


def rank_along(state: AcceleratorState, *axes: str) -> int:
    """This rank's place among the ranks of these axes of the mesh, 0 where it has none of them.

    Without a mesh all ranks lie on one data axis.
    """
    mesh = state.device_mesh
    if mesh is None:
        return state.process_index if "dp_replicate" in axes else 0
    place = 0
    for axis in axes:
        if axis in (mesh.mesh_dim_names or ()):
            place = place * mesh[axis].size() + mesh.get_local_rank(axis)
    return place


def repeats_samples(state: AcceleratorState) -> bool:
    """Whether a lower rank works on the same samples as this one."""
    if state.device_mesh is None:
        return False
    return accel_data.data_place(state.device_mesh, state.process_index).is_copy(state.process_index)


def _from_tp_plugin(tp_size: int, config: Any) -> Any:
    warnings.warn(
        f"Accelerator(torch_tp_plugin=...) is deprecated: pass parallelism_config=ParallelismConfig(tp_size={tp_size})",
        FutureWarning,
        stacklevel=4,
    )
    if config is None:
        return accel_parallel.ParallelismConfig(tp_size=tp_size)
    if config.tp_size != tp_size:
        raise SettingError(
            f"torch_tp_plugin with tp_size={tp_size} contradicts parallelism_config with tp_size={config.tp_size}: "
            "give parallelism_config alone"
        )
    return config


def _with_sharding(plugin: Any, config: Any) -> Any:
    """The plugin where the mesh shares parameters; replicas of a model that tp shares are made by `fully_shard` too."""
    needed = config.dp_shard_enabled or (config.tp_enabled and bool(config.loss_dim_names))
    possible = needed or config.cp_enabled or config.sp_enabled
    if plugin is not None and plugin.fsdp_version != 2:
        raise SettingError(
            f"fsdp_plugin with fsdp_version={plugin.fsdp_version} cannot follow a parallelism_config: use "
            "FullyShardedDataParallelPlugin(fsdp_version=2), or leave parallelism_config out"
        )
    if plugin is None and needed:
        return accel_parallel.FullyShardedDataParallelPlugin(fsdp_version=2)
    if plugin is not None and not possible and config.total_size > 1:
        raise SettingError(
            "fsdp_plugin has nothing to share parameters over: parallelism_config has dp_shard_size=1. Set "
            "dp_shard_size, or leave fsdp_plugin out"
        )
    return plugin


def shared_sequences(
    state: AcceleratorState,
    buffers: Sequence[Tensor] | None,
    buffer_seq_dims: Sequence[int] | None,
    no_restore_buffers: Collection[Tensor] | None,
) -> AbstractContextManager[None]:
    """The block in which the ranks of the cp axis share sequences; an empty one where there is no such axis."""
    config = state.parallelism_config
    if config is None or not config.cp_enabled:
        return nullcontext()
    return accel_parallel.sequence_context(
        state.device_mesh["cp"],
        buffers,
        buffer_seq_dims,
        no_restore_buffers,
        rotation=config.cp_handler.cp_comm_strategy,
    )


def batch_transform(state: AcceleratorState) -> Callable[[Any], Any] | None:
    """What prepared loaders make of each batch: under sp this rank's part of its sequences."""
    config = state.parallelism_config
    if config is None or not config.sp_enabled:
        return None
    handler = config.sp_handler
    return accel_parallel.ShardBatch(
        group=state.device_mesh["sp"].get_group(),
        length=None if handler.sp_seq_length_is_variable else handler.sp_seq_length,
    )
