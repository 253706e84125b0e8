"""Ranks, devices, settings, collectives and reproducible randomness for PyTorch training."""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from accel_state.accelerator_state import AcceleratorState as AcceleratorState
    from accel_state.accelerator_state import is_initialized as is_initialized
    from accel_state.collectives.operations import broadcast as broadcast
    from accel_state.collectives.operations import broadcast_object_list as broadcast_object_list
    from accel_state.collectives.operations import gather as gather
    from accel_state.collectives.operations import gather_object as gather_object
    from accel_state.collectives.operations import pad_across_processes as pad_across_processes
    from accel_state.collectives.operations import reduce as reduce
    from accel_state.collectives.operations import wait_for_everyone as wait_for_everyone
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
    from accel_state.device_count import count_devices as count_devices
    from accel_state.devices import DeviceKind as DeviceKind
    from accel_state.devices import device_kind as device_kind
    from accel_state.enums import DistributedType as DistributedType
    from accel_state.enums import RNGType as RNGType
    from accel_state.gradient_state import GradientState as GradientState
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
    from accel_state.topology import Topology as Topology

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "process_state": ["PartialState"],
        "accelerator_state": ["AcceleratorState", "is_initialized"],
        "gradient_state": ["GradientState"],
        "topology": ["Topology"],
        "enums": ["DistributedType", "RNGType"],
        "kwargs": ["KwargsHandler", "InitProcessGroupKwargs"],
        "protocols": ["Stateful"],
        "devices": ["DeviceKind", "device_kind"],
        "device_count": ["count_devices"],
        "collectives.operations": [
            "gather",
            "gather_object",
            "broadcast",
            "broadcast_object_list",
            "reduce",
            "pad_across_processes",
            "wait_for_everyone",
        ],
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
        "loggers": ["MultiProcessAdapter", "get_logger"],
    },
)
