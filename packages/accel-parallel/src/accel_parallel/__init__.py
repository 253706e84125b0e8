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
    from .dispatch.align import AlignDevicesHook as AlignDevicesHook
    from .dispatch.attach import attach_align_device_hook as attach_align_device_hook
    from .dispatch.attach import attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks
    from .dispatch.attach import attach_execution_device_hook as attach_execution_device_hook
    from .dispatch.casting import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
    from .dispatch.casting import LayerwiseCastingHook as LayerwiseCastingHook
    from .dispatch.casting import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
    from .dispatch.device_maps import check_device_map as check_device_map
    from .dispatch.device_maps import clean_device_map as clean_device_map
    from .dispatch.device_maps import extract_submodules_state_dict as extract_submodules_state_dict
    from .dispatch.device_maps import has_several_devices as has_several_devices
    from .dispatch.dispatching import cpu_offload as cpu_offload
    from .dispatch.dispatching import disk_offload as disk_offload
    from .dispatch.dispatching import dispatch_model as dispatch_model
    from .dispatch.empty_weights import init_empty_weights as init_empty_weights
    from .dispatch.empty_weights import init_on_device as init_on_device
    from .dispatch.hooks import ModelHook as ModelHook
    from .dispatch.hooks import SequentialHook as SequentialHook
    from .dispatch.hooks import add_hook_to_module as add_hook_to_module
    from .dispatch.hooks import remove_hook_from_module as remove_hook_from_module
    from .dispatch.hooks import remove_hook_from_submodules as remove_hook_from_submodules
    from .dispatch.module_tensors import align_module_device as align_module_device
    from .dispatch.module_tensors import get_non_persistent_buffers as get_non_persistent_buffers
    from .dispatch.module_tensors import has_offloaded_params as has_offloaded_params
    from .dispatch.module_tensors import named_module_tensors as named_module_tensors
    from .dispatch.module_tensors import set_module_tensor_to_device as set_module_tensor_to_device
    from .dispatch.numbers import CustomDtype as CustomDtype
    from .dispatch.numbers import convert_file_size_to_int as convert_file_size_to_int
    from .dispatch.numbers import dtype_byte_size as dtype_byte_size
    from .dispatch.offload_files import OffloadedWeightsLoader as OffloadedWeightsLoader
    from .dispatch.offload_files import PrefixedDataset as PrefixedDataset
    from .dispatch.offload_files import load_offloaded_weight as load_offloaded_weight
    from .dispatch.offload_files import load_offloaded_weights as load_offloaded_weights
    from .dispatch.offload_files import offload_state_dict as offload_state_dict
    from .dispatch.offload_files import offload_weight as offload_weight
    from .dispatch.offload_files import save_offload_index as save_offload_index
    from .dispatch.planner import get_balanced_memory as get_balanced_memory
    from .dispatch.planner import infer_auto_device_map as infer_auto_device_map
    from .dispatch.sizes import calculate_maximum_sizes as calculate_maximum_sizes
    from .dispatch.sizes import compute_module_sizes as compute_module_sizes
    from .dispatch.sizes import compute_module_total_buffer_size as compute_module_total_buffer_size
    from .dispatch.sizes import get_max_layer_size as get_max_layer_size
    from .dispatch.sizes import get_max_memory as get_max_memory
    from .dispatch.stored_states import get_module_size_with_ties as get_module_size_with_ties
    from .dispatch.stored_states import get_state_dict_from_offload as get_state_dict_from_offload
    from .dispatch.stored_states import get_state_dict_offloaded_model as get_state_dict_offloaded_model
    from .dispatch.ties import check_tied_parameters_in_config as check_tied_parameters_in_config
    from .dispatch.ties import check_tied_parameters_on_same_device as check_tied_parameters_on_same_device
    from .dispatch.ties import find_tied_parameters as find_tied_parameters
    from .dispatch.ties import id_tensor_storage as id_tensor_storage
    from .dispatch.ties import retie_parameters as retie_parameters
    from .dispatch.whole_models import CpuOffload as CpuOffload
    from .dispatch.whole_models import UserCpuOffloadHook as UserCpuOffloadHook
    from .dispatch.whole_models import cpu_offload_with_hook as cpu_offload_with_hook
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
    from .fsdp_helpers import get_module_class_from_name as get_module_class_from_name
    from .fsdp_helpers import get_parameters_from_modules as get_parameters_from_modules
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
    from .pipeline.inference import build_pipeline as build_pipeline
    from .pipeline.inference import find_pippy_batch_size as find_pippy_batch_size
    from .pipeline.inference import generate_device_map as generate_device_map
    from .pipeline.inference import pippy_forward as pippy_forward
    from .pipeline.inference import prepare_pippy as prepare_pippy
    from .pipeline.model import PipelinedModel as PipelinedModel
    from .plan import SLOTS as SLOTS
    from .plan import Plan as Plan
    from .plan import PlanContext as PlanContext
    from .plan import Step as Step
    from .plan import is_pipelined as is_pipelined
    from .release_bounds import BETA_CP_AVAILABLE_PYTORCH_VERSION as BETA_CP_AVAILABLE_PYTORCH_VERSION
    from .release_bounds import BETA_SP_AVAILABLE_DEEPSPEED_VERSION as BETA_SP_AVAILABLE_DEEPSPEED_VERSION
    from .release_bounds import BETA_TP_AVAILABLE_PYTORCH_VERSION as BETA_TP_AVAILABLE_PYTORCH_VERSION
    from .release_bounds import BETA_TP_AVAILABLE_TRANSFORMERS_VERSION as BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
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
    from .unwrap import is_peft_model as is_peft_model

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
            "get_module_class_from_name",
            "get_parameters_from_modules",
        ],
        "release_bounds": [
            "BETA_CP_AVAILABLE_PYTORCH_VERSION",
            "BETA_SP_AVAILABLE_DEEPSPEED_VERSION",
            "BETA_TP_AVAILABLE_PYTORCH_VERSION",
            "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION",
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
        "pipeline.inference": [
            "build_pipeline",
            "find_pippy_batch_size",
            "generate_device_map",
            "pippy_forward",
            "prepare_pippy",
        ],
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
        "unwrap": [
            "extract_model_from_parallel",
            "has_compiled_regions",
            "inner_model",
            "is_compiled_module",
            "is_peft_model",
        ],
        "dynamo_plugin": ["DynamoBackend", "TorchDynamoPlugin"],
        "steps.compiling": [
            "compile_blocks",
            "compile_model",
            "compile_regions",
            "compile_regions_deepspeed",
            "compile_regions_fsdp2",
            "compiling_of",
        ],
        "dispatch.align": ["AlignDevicesHook"],
        "dispatch.attach": [
            "attach_align_device_hook",
            "attach_align_device_hook_on_blocks",
            "attach_execution_device_hook",
        ],
        "dispatch.casting": [
            "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
            "LayerwiseCastingHook",
            "attach_layerwise_casting_hooks",
        ],
        "dispatch.device_maps": [
            "check_device_map",
            "clean_device_map",
            "extract_submodules_state_dict",
            "has_several_devices",
        ],
        "dispatch.dispatching": ["cpu_offload", "disk_offload", "dispatch_model"],
        "dispatch.empty_weights": ["init_empty_weights", "init_on_device"],
        "dispatch.hooks": [
            "ModelHook",
            "SequentialHook",
            "add_hook_to_module",
            "remove_hook_from_module",
            "remove_hook_from_submodules",
        ],
        "dispatch.module_tensors": [
            "align_module_device",
            "get_non_persistent_buffers",
            "has_offloaded_params",
            "named_module_tensors",
            "set_module_tensor_to_device",
        ],
        "dispatch.numbers": ["CustomDtype", "convert_file_size_to_int", "dtype_byte_size"],
        "dispatch.offload_files": [
            "OffloadedWeightsLoader",
            "PrefixedDataset",
            "load_offloaded_weight",
            "load_offloaded_weights",
            "offload_state_dict",
            "offload_weight",
            "save_offload_index",
        ],
        "dispatch.planner": ["get_balanced_memory", "infer_auto_device_map"],
        "dispatch.sizes": [
            "calculate_maximum_sizes",
            "compute_module_sizes",
            "compute_module_total_buffer_size",
            "get_max_layer_size",
            "get_max_memory",
        ],
        "dispatch.stored_states": [
            "get_module_size_with_ties",
            "get_state_dict_from_offload",
            "get_state_dict_offloaded_model",
        ],
        "dispatch.ties": [
            "check_tied_parameters_in_config",
            "check_tied_parameters_on_same_device",
            "find_tied_parameters",
            "id_tensor_storage",
            "retie_parameters",
        ],
        "dispatch.whole_models": ["CpuOffload", "UserCpuOffloadHook", "cpu_offload_with_hook"],
    },
)
