"""Parallelism for PyTorch as an ordered plan of small, checkable steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from .accumulation import Accumulation as Accumulation
    from .accumulation import GradientAccumulationPlugin as GradientAccumulationPlugin
    from .axis_handlers import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
    from .axis_handlers import TorchContextParallelConfig as TorchContextParallelConfig
    from .axis_handlers import TorchTensorParallelConfig as TorchTensorParallelConfig
    from .axis_handlers import TorchTensorParallelPlugin as TorchTensorParallelPlugin
    from .clipping import clip_grad_norm_ as clip_grad_norm_
    from .clipping import clip_grad_value_ as clip_grad_value_
    from .clipping import total_norm as total_norm
    from .context_block import sequence_context as sequence_context
    from .ddp_kwargs import DDPCommunicationHookType as DDPCommunicationHookType
    from .ddp_kwargs import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from .dynamo_plugin import DynamoBackend as DynamoBackend
    from .dynamo_plugin import TorchDynamoPlugin as TorchDynamoPlugin
    from .engines.base import Engine as Engine
    from .engines.base import Prepared as Prepared
    from .engines.native import NativeEngine as NativeEngine
    from .entry_points import route_method as route_method
    from .flat_state import write_back as write_back
    from .fsdp_helpers import disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading
    from .fsdp_helpers import enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading
    from .fsdp_helpers import ensure_weights_retied as ensure_weights_retied
    from .fsdp_helpers import fsdp2_apply_ac as fsdp2_apply_ac
    from .fsdp_helpers import fsdp2_canonicalize_names as fsdp2_canonicalize_names
    from .fsdp_helpers import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
    from .fsdp_helpers import fsdp2_prepare_model as fsdp2_prepare_model
    from .fsdp_helpers import fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters
    from .fsdp_helpers import get_module_children_bottom_up as get_module_children_bottom_up
    from .fsdp_plugin import FSDP2_STATE_DICT_TYPE as FSDP2_STATE_DICT_TYPE
    from .fsdp_plugin import FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY
    from .fsdp_plugin import FSDP_BACKWARD_PREFETCH as FSDP_BACKWARD_PREFETCH
    from .fsdp_plugin import FSDP_SHARDING_STRATEGY as FSDP_SHARDING_STRATEGY
    from .fsdp_plugin import FSDP_STATE_DICT_TYPE as FSDP_STATE_DICT_TYPE
    from .fsdp_plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from .local_sgd import LocalSGD as LocalSGD
    from .meshes import data_parallel_size as data_parallel_size
    from .meshes import fsdp_mesh as fsdp_mesh
    from .meshes import loss_group as loss_group
    from .meshes import loss_size as loss_size
    from .optimizer import AcceleratedOptimizer as AcceleratedOptimizer
    from .optimizer import move_to_device as move_to_device
    from .optimizer import patch_optimizer_step as patch_optimizer_step
    from .parallelism import ParallelismConfig as ParallelismConfig
    from .pipeline.config import PipelineConfig as PipelineConfig
    from .pipeline.model import PipelinedModel as PipelinedModel
    from .plan import SLOTS as SLOTS
    from .plan import Plan as Plan
    from .plan import PlanContext as PlanContext
    from .plan import Step as Step
    from .plan import is_pipelined as is_pipelined
    from .ring import Ring as Ring
    from .ring import ring_attention as ring_attention
    from .scheduler import AcceleratedScheduler as AcceleratedScheduler
    from .sequence_batches import ShardBatch as ShardBatch
    from .sequence_batches import shard_batch as shard_batch
    from .sequence_shards import load_balanced_positions as load_balanced_positions
    from .sequence_shards import shift_labels as shift_labels
    from .state_dicts import full_state_dict as full_state_dict
    from .state_dicts import is_spread as is_spread
    from .state_dicts import model_has_dtensor as model_has_dtensor
    from .steps.activation_checkpointing import activation_checkpointing as activation_checkpointing
    from .steps.activation_checkpointing import checkpointing_of as checkpointing_of
    from .steps.compiling import compile_blocks as compile_blocks
    from .steps.compiling import compile_model as compile_model
    from .steps.compiling import compile_regions as compile_regions
    from .steps.compiling import compile_regions_deepspeed as compile_regions_deepspeed
    from .steps.compiling import compile_regions_fsdp2 as compile_regions_fsdp2
    from .steps.compiling import compiling_of as compiling_of
    from .steps.cp import context_parallel as context_parallel
    from .steps.ddp import ddp as ddp
    from .steps.fsdp1 import fsdp1 as fsdp1
    from .steps.fsdp2 import fsdp2 as fsdp2
    from .steps.fsdp2 import fully_shard_blocks as fully_shard_blocks
    from .steps.pp import pipelined as pipelined
    from .steps.single import single as single
    from .steps.sp import sequence_parallel as sequence_parallel
    from .steps.tp import is_tensor_parallel as is_tensor_parallel
    from .steps.tp import tensor_parallel as tensor_parallel
    from .sync import join_uneven_inputs as join_uneven_inputs
    from .sync import no_sync as no_sync
    from .sync import trigger_sync_in_backward as trigger_sync_in_backward
    from .sync import waits_for_ranks as waits_for_ranks
    from .ulysses import ulysses_attention as ulysses_attention
    from .unwrap import extract_model_from_parallel as extract_model_from_parallel
    from .unwrap import has_compiled_regions as has_compiled_regions
    from .unwrap import inner_model as inner_model
    from .unwrap import is_compiled_module as is_compiled_module

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "plan": ["Plan", "PlanContext", "Step", "SLOTS", "is_pipelined"],
        "steps.single": ["single"],
        "steps.ddp": ["ddp"],
        "steps.activation_checkpointing": ["activation_checkpointing", "checkpointing_of"],
        "engines.base": ["Engine", "Prepared"],
        "engines.native": ["NativeEngine"],
        "optimizer": ["AcceleratedOptimizer", "move_to_device", "patch_optimizer_step"],
        "scheduler": ["AcceleratedScheduler"],
        "accumulation": ["Accumulation", "GradientAccumulationPlugin"],
        "ddp_kwargs": ["DistributedDataParallelKwargs", "DDPCommunicationHookType"],
        "clipping": ["clip_grad_norm_", "clip_grad_value_", "total_norm"],
        "entry_points": ["route_method"],
        "sync": ["no_sync", "trigger_sync_in_backward", "join_uneven_inputs", "waits_for_ranks"],
        "axis_handlers": [
            "TorchTensorParallelConfig",
            "TorchContextParallelConfig",
            "DeepSpeedSequenceParallelConfig",
            "TorchTensorParallelPlugin",
        ],
        "local_sgd": ["LocalSGD"],
        "fsdp_helpers": [
            "disable_fsdp_ram_efficient_loading",
            "enable_fsdp_ram_efficient_loading",
            "ensure_weights_retied",
            "fsdp2_apply_ac",
            "fsdp2_canonicalize_names",
            "fsdp2_load_full_state_dict",
            "fsdp2_prepare_model",
            "fsdp2_switch_optimizer_parameters",
            "get_module_children_bottom_up",
        ],
        "parallelism": ["ParallelismConfig"],
        "meshes": ["data_parallel_size", "loss_group", "loss_size", "fsdp_mesh"],
        "fsdp_plugin": [
            "FullyShardedDataParallelPlugin",
            "FSDP_SHARDING_STRATEGY",
            "FSDP_AUTO_WRAP_POLICY",
            "FSDP_BACKWARD_PREFETCH",
            "FSDP_STATE_DICT_TYPE",
            "FSDP2_STATE_DICT_TYPE",
        ],
        "pipeline.config": ["PipelineConfig"],
        "pipeline.model": ["PipelinedModel"],
        "steps.pp": ["pipelined"],
        "steps.tp": ["is_tensor_parallel", "tensor_parallel"],
        "steps.cp": ["context_parallel"],
        "steps.sp": ["sequence_parallel"],
        "steps.fsdp1": ["fsdp1"],
        "steps.fsdp2": ["fsdp2", "fully_shard_blocks"],
        "context_block": ["sequence_context"],
        "sequence_shards": ["load_balanced_positions", "shift_labels"],
        "sequence_batches": ["ShardBatch", "shard_batch"],
        "ring": ["Ring", "ring_attention"],
        "ulysses": ["ulysses_attention"],
        "state_dicts": ["full_state_dict", "is_spread", "model_has_dtensor"],
        "flat_state": ["write_back"],
        "unwrap": ["extract_model_from_parallel", "has_compiled_regions", "inner_model", "is_compiled_module"],
        "dynamo_plugin": ["DynamoBackend", "TorchDynamoPlugin"],
        "steps.compiling": [
            "compile_blocks",
            "compile_model",
            "compile_regions",
            "compile_regions_deepspeed",
            "compile_regions_fsdp2",
            "compiling_of",
        ],
    },
)
