"""Ranks, devices, settings, collectives and reproducible randomness for PyTorch training."""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from accel_state.accelerator_state import AcceleratorState as AcceleratorState
    from accel_state.accelerator_state import is_initialized as is_initialized
    from accel_state.availability import is_4bit_bnb_available as is_4bit_bnb_available
    from accel_state.availability import is_8bit_bnb_available as is_8bit_bnb_available
    from accel_state.availability import is_aim_available as is_aim_available
    from accel_state.availability import is_amdsmi_available as is_amdsmi_available
    from accel_state.availability import (
        is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
    )
    from accel_state.availability import is_bnb_available as is_bnb_available
    from accel_state.availability import is_boto3_available as is_boto3_available
    from accel_state.availability import is_clearml_available as is_clearml_available
    from accel_state.availability import is_comet_ml_available as is_comet_ml_available
    from accel_state.availability import is_datasets_available as is_datasets_available
    from accel_state.availability import is_deepspeed_available as is_deepspeed_available
    from accel_state.availability import is_dvclive_available as is_dvclive_available
    from accel_state.availability import is_import_timer_available as is_import_timer_available
    from accel_state.availability import is_lomo_available as is_lomo_available
    from accel_state.availability import is_matplotlib_available as is_matplotlib_available
    from accel_state.availability import is_megatron_lm_available as is_megatron_lm_available
    from accel_state.availability import is_mlflow_available as is_mlflow_available
    from accel_state.availability import is_msamp_available as is_msamp_available
    from accel_state.availability import is_pandas_available as is_pandas_available
    from accel_state.availability import is_peft_available as is_peft_available
    from accel_state.availability import is_pippy_available as is_pippy_available
    from accel_state.availability import is_pynvml_available as is_pynvml_available
    from accel_state.availability import is_pytest_available as is_pytest_available
    from accel_state.availability import is_rich_available as is_rich_available
    from accel_state.availability import is_sagemaker_available as is_sagemaker_available
    from accel_state.availability import is_schedulefree_available as is_schedulefree_available
    from accel_state.availability import is_swanlab_available as is_swanlab_available
    from accel_state.availability import is_tensorboard_available as is_tensorboard_available
    from accel_state.availability import is_timm_available as is_timm_available
    from accel_state.availability import is_torchao_available as is_torchao_available
    from accel_state.availability import is_torchdata_available as is_torchdata_available
    from accel_state.availability import (
        is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
    )
    from accel_state.availability import is_torchvision_available as is_torchvision_available
    from accel_state.availability import is_trackio_available as is_trackio_available
    from accel_state.availability import is_transformer_engine_available as is_transformer_engine_available
    from accel_state.availability import is_transformers_available as is_transformers_available
    from accel_state.availability import is_triton_available as is_triton_available
    from accel_state.availability import is_wandb_available as is_wandb_available
    from accel_state.availability import is_weights_only_available as is_weights_only_available
    from accel_state.callsite import warn_user as warn_user
    from accel_state.collectives.operations import broadcast as broadcast
    from accel_state.collectives.operations import broadcast_object_list as broadcast_object_list
    from accel_state.collectives.operations import copy_tensor_to_devices as copy_tensor_to_devices
    from accel_state.collectives.operations import gather as gather
    from accel_state.collectives.operations import gather_object as gather_object
    from accel_state.collectives.operations import pad_across_processes as pad_across_processes
    from accel_state.collectives.operations import wait_for_everyone as wait_for_everyone
    from accel_state.collectives.reduction import reduce as reduce
    from accel_state.collectives.trees import TensorInformation as TensorInformation
    from accel_state.collectives.trees import concatenate as concatenate
    from accel_state.collectives.trees import find_batch_size as find_batch_size
    from accel_state.collectives.trees import find_device as find_device
    from accel_state.collectives.trees import get_data_structure as get_data_structure
    from accel_state.collectives.trees import honor_type as honor_type
    from accel_state.collectives.trees import ignorant_find_batch_size as ignorant_find_batch_size
    from accel_state.collectives.trees import initialize_tensors as initialize_tensors
    from accel_state.collectives.trees import is_namedtuple as is_namedtuple
    from accel_state.collectives.trees import is_tensor_information as is_tensor_information
    from accel_state.collectives.trees import is_torch_tensor as is_torch_tensor
    from accel_state.collectives.trees import listify as listify
    from accel_state.collectives.trees import pad_input_tensors as pad_input_tensors
    from accel_state.collectives.trees import recursively_apply as recursively_apply
    from accel_state.collectives.trees import send_to_device as send_to_device
    from accel_state.collectives.trees import slice_tensors as slice_tensors
    from accel_state.conveniences import ThreadLocalSharedDict as ThreadLocalSharedDict
    from accel_state.conveniences import are_libraries_initialized as are_libraries_initialized
    from accel_state.conveniences import check_os_kernel as check_os_kernel
    from accel_state.conveniences import convert_bytes as convert_bytes
    from accel_state.conveniences import deepspeed_required as deepspeed_required
    from accel_state.conveniences import do_nothing as do_nothing
    from accel_state.conveniences import get_pretty_name as get_pretty_name
    from accel_state.conveniences import is_port_in_use as is_port_in_use
    from accel_state.conveniences import merge_dicts as merge_dicts
    from accel_state.conveniences import recursive_getattr as recursive_getattr
    from accel_state.conveniences import torchao_required as torchao_required
    from accel_state.device_checks import check_cuda_fp8_capability as check_cuda_fp8_capability
    from accel_state.device_checks import is_bf16_available as is_bf16_available
    from accel_state.device_checks import is_cuda_available as is_cuda_available
    from accel_state.device_checks import is_fp8_available as is_fp8_available
    from accel_state.device_checks import is_fp16_available as is_fp16_available
    from accel_state.device_checks import is_habana_gaudi1 as is_habana_gaudi1
    from accel_state.device_checks import is_hpu_available as is_hpu_available
    from accel_state.device_checks import is_mlu_available as is_mlu_available
    from accel_state.device_checks import is_mps_available as is_mps_available
    from accel_state.device_checks import is_musa_available as is_musa_available
    from accel_state.device_checks import is_neuron_available as is_neuron_available
    from accel_state.device_checks import is_npu_available as is_npu_available
    from accel_state.device_checks import is_rocm_available as is_rocm_available
    from accel_state.device_checks import is_sdaa_available as is_sdaa_available
    from accel_state.device_checks import is_torch_xla_available as is_torch_xla_available
    from accel_state.device_checks import is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available
    from accel_state.device_checks import is_xccl_available as is_xccl_available
    from accel_state.device_checks import is_xpu_available as is_xpu_available
    from accel_state.device_count import count_devices as count_devices
    from accel_state.devices import DeviceKind as DeviceKind
    from accel_state.devices import device_kind as device_kind
    from accel_state.devices import live_accelerators as live_accelerators
    from accel_state.enums import TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES
    from accel_state.enums import ComputeEnvironment as ComputeEnvironment
    from accel_state.enums import DistributedType as DistributedType
    from accel_state.enums import RNGType as RNGType
    from accel_state.environment import clear_environment as clear_environment
    from accel_state.environment import convert_dict_to_env_variables as convert_dict_to_env_variables
    from accel_state.environment import get_int_from_env as get_int_from_env
    from accel_state.environment import parse_choice_from_env as parse_choice_from_env
    from accel_state.environment import parse_flag_from_env as parse_flag_from_env
    from accel_state.environment import patch_environment as patch_environment
    from accel_state.environment import purge_accelerate_environment as purge_accelerate_environment
    from accel_state.environment import str_to_bool as str_to_bool
    from accel_state.errors import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
    from accel_state.errors import DistributedOperationException as DistributedOperationException
    from accel_state.exit_codes import STOPPED_EXIT_CODE as STOPPED_EXIT_CODE
    from accel_state.gradient_state import GradientState as GradientState
    from accel_state.hardware import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
    from accel_state.hardware import get_cpu_distributed_information as get_cpu_distributed_information
    from accel_state.hardware import get_current_device_type as get_current_device_type
    from accel_state.hardware import get_gpu_info as get_gpu_info
    from accel_state.hardware import set_numa_affinity as set_numa_affinity
    from accel_state.kwargs import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accel_state.kwargs import KwargsHandler as KwargsHandler
    from accel_state.loggers import MultiProcessAdapter as MultiProcessAdapter
    from accel_state.loggers import get_logger as get_logger
    from accel_state.process_state import PartialState as PartialState
    from accel_state.protocols import Stateful as Stateful
    from accel_state.rng import capture_rng_state as capture_rng_state
    from accel_state.rng import current_seed as current_seed
    from accel_state.rng import restore_rng_state as restore_rng_state
    from accel_state.rng import seed_for_rank as seed_for_rank
    from accel_state.rng import set_seed as set_seed
    from accel_state.rng import synchronize_rng_state as synchronize_rng_state
    from accel_state.rng import synchronize_rng_states as synchronize_rng_states
    from accel_state.splitting import drop_padding as drop_padding
    from accel_state.stop_notice import StopNotice as StopNotice
    from accel_state.topology import Topology as Topology
    from accel_state.trigger import Trigger as Trigger
    from accel_state.versions import compare_versions as compare_versions
    from accel_state.versions import is_torch_version as is_torch_version

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "process_state": ["PartialState"],
        "accelerator_state": ["AcceleratorState", "is_initialized"],
        "gradient_state": ["GradientState"],
        "splitting": ["drop_padding"],
        "topology": ["Topology"],
        "trigger": ["Trigger"],
        "exit_codes": ["STOPPED_EXIT_CODE"],
        "stop_notice": ["StopNotice"],
        "enums": ["ComputeEnvironment", "DistributedType", "RNGType", "TORCH_DISTRIBUTED_OPERATION_TYPES"],
        "kwargs": ["KwargsHandler", "InitProcessGroupKwargs"],
        "protocols": ["Stateful"],
        "devices": ["DeviceKind", "device_kind", "live_accelerators"],
        "device_count": ["count_devices"],
        "callsite": ["warn_user"],
        "collectives.operations": [
            "gather",
            "gather_object",
            "broadcast",
            "broadcast_object_list",
            "copy_tensor_to_devices",
            "pad_across_processes",
            "wait_for_everyone",
        ],
        "collectives.reduction": ["reduce"],
        "collectives.trees": [
            "TensorInformation",
            "concatenate",
            "find_batch_size",
            "find_device",
            "get_data_structure",
            "honor_type",
            "ignorant_find_batch_size",
            "initialize_tensors",
            "is_namedtuple",
            "is_tensor_information",
            "is_torch_tensor",
            "listify",
            "pad_input_tensors",
            "recursively_apply",
            "send_to_device",
            "slice_tensors",
        ],
        "rng": [
            "set_seed",
            "current_seed",
            "seed_for_rank",
            "synchronize_rng_state",
            "synchronize_rng_states",
            "capture_rng_state",
            "restore_rng_state",
        ],
        "availability": [
            "is_4bit_bnb_available",
            "is_8bit_bnb_available",
            "is_aim_available",
            "is_amdsmi_available",
            "is_bitsandbytes_multi_backend_available",
            "is_bnb_available",
            "is_boto3_available",
            "is_clearml_available",
            "is_comet_ml_available",
            "is_datasets_available",
            "is_deepspeed_available",
            "is_dvclive_available",
            "is_import_timer_available",
            "is_lomo_available",
            "is_matplotlib_available",
            "is_megatron_lm_available",
            "is_mlflow_available",
            "is_msamp_available",
            "is_pandas_available",
            "is_peft_available",
            "is_pippy_available",
            "is_pynvml_available",
            "is_pytest_available",
            "is_rich_available",
            "is_sagemaker_available",
            "is_schedulefree_available",
            "is_swanlab_available",
            "is_tensorboard_available",
            "is_timm_available",
            "is_torchao_available",
            "is_torchdata_available",
            "is_torchdata_stateful_dataloader_available",
            "is_torchvision_available",
            "is_trackio_available",
            "is_transformer_engine_available",
            "is_transformers_available",
            "is_triton_available",
            "is_wandb_available",
            "is_weights_only_available",
        ],
        "device_checks": [
            "check_cuda_fp8_capability",
            "is_bf16_available",
            "is_cuda_available",
            "is_fp16_available",
            "is_fp8_available",
            "is_habana_gaudi1",
            "is_hpu_available",
            "is_mlu_available",
            "is_mps_available",
            "is_musa_available",
            "is_neuron_available",
            "is_npu_available",
            "is_rocm_available",
            "is_sdaa_available",
            "is_torch_xla_available",
            "is_transformer_engine_mxfp8_available",
            "is_xccl_available",
            "is_xpu_available",
        ],
        "versions": ["compare_versions", "is_torch_version"],
        "environment": [
            "clear_environment",
            "convert_dict_to_env_variables",
            "get_int_from_env",
            "parse_choice_from_env",
            "parse_flag_from_env",
            "patch_environment",
            "purge_accelerate_environment",
            "str_to_bool",
        ],
        "conveniences": [
            "ThreadLocalSharedDict",
            "are_libraries_initialized",
            "check_os_kernel",
            "convert_bytes",
            "deepspeed_required",
            "do_nothing",
            "get_pretty_name",
            "is_port_in_use",
            "merge_dicts",
            "recursive_getattr",
            "torchao_required",
        ],
        "hardware": [
            "check_cuda_p2p_ib_support",
            "get_cpu_distributed_information",
            "get_current_device_type",
            "get_gpu_info",
            "set_numa_affinity",
        ],
        "errors": ["CannotPadNestedTensorWarning", "DistributedOperationException"],
        "loggers": ["MultiProcessAdapter", "get_logger"],
    },
)
