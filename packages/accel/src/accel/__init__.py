"""accel: the training-loop library for PyTorch. `Accelerator` is the whole; each part is a package of its own.

Beside it lie the parts' names that most scripts need; all others are in `accel.utils`.
"""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from accel_ckpt import Checkpointer as Checkpointer
    from accel_ckpt import ProjectConfiguration as ProjectConfiguration
    from accel_data import DataLoaderConfiguration as DataLoaderConfiguration
    from accel_data import prepare_data_loader as prepare_data_loader
    from accel_data import skip_first_batches as skip_first_batches
    from accel_parallel import DDPCommunicationHookType as DDPCommunicationHookType
    from accel_parallel import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from accel_parallel import GradientAccumulationPlugin as GradientAccumulationPlugin
    from accel_parallel import Plan as Plan
    from accel_parallel import cpu_offload as cpu_offload
    from accel_parallel import cpu_offload_with_hook as cpu_offload_with_hook
    from accel_parallel import disk_offload as disk_offload
    from accel_parallel import dispatch_model as dispatch_model
    from accel_parallel import infer_auto_device_map as infer_auto_device_map
    from accel_parallel import init_empty_weights as init_empty_weights
    from accel_parallel import init_on_device as init_on_device
    from accel_parallel import prepare_pippy as prepare_pippy
    from accel_precision import AutocastKwargs as AutocastKwargs
    from accel_precision import GradScalerKwargs as GradScalerKwargs
    from accel_precision import PrecisionPolicy as PrecisionPolicy
    from accel_state import STOPPED_EXIT_CODE as STOPPED_EXIT_CODE
    from accel_state import DistributedType as DistributedType
    from accel_state import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accel_state import PartialState as PartialState
    from accel_state import set_seed as set_seed
    from accel_state import synchronize_rng_states as synchronize_rng_states

    from .accelerator import Accelerator as Accelerator
    from .big_models import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from .big_models import load_checkpoint_in_model as load_checkpoint_in_model
    from .commands.estimate import estimate_command as estimate_command
    from .commands.estimate import estimate_command_parser as estimate_command_parser
    from .commands.test import test_command as test_command
    from .commands.test import test_command_parser as test_command_parser
    from .out_of_memory import clear_device_cache as clear_device_cache
    from .out_of_memory import find_executable_batch_size as find_executable_batch_size
    from .out_of_memory import release_memory as release_memory
    from .out_of_memory import should_reduce_batch_size as should_reduce_batch_size

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "accelerator": ["Accelerator"],
        "big_models": ["load_checkpoint_and_dispatch", "load_checkpoint_in_model"],
        "commands.estimate": ["estimate_command", "estimate_command_parser"],
        "commands.test": ["test_command", "test_command_parser"],
        "out_of_memory": [
            "clear_device_cache",
            "find_executable_batch_size",
            "release_memory",
            "should_reduce_batch_size",
        ],
    },
    elsewhere={
        "accel_state": [
            "PartialState",
            "STOPPED_EXIT_CODE",
            "DistributedType",
            "InitProcessGroupKwargs",
            "set_seed",
            "synchronize_rng_states",
        ],
        "accel_data": ["DataLoaderConfiguration", "prepare_data_loader", "skip_first_batches"],
        "accel_precision": ["AutocastKwargs", "GradScalerKwargs", "PrecisionPolicy"],
        "accel_parallel": [
            "DDPCommunicationHookType",
            "DistributedDataParallelKwargs",
            "GradientAccumulationPlugin",
            "Plan",
            "cpu_offload",
            "cpu_offload_with_hook",
            "disk_offload",
            "dispatch_model",
            "infer_auto_device_map",
            "init_empty_weights",
            "init_on_device",
            "prepare_pippy",
        ],
        "accel_ckpt": ["Checkpointer", "ProjectConfiguration"],
    },
)
