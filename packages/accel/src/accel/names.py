"""The parts' names that `accel` offers at its top, beside `Accelerator`; all others are in `accel.utils`."""

from accel_ckpt import Checkpointer, ProjectConfiguration
from accel_data import DataLoaderConfiguration, prepare_data_loader, skip_first_batches
from accel_parallel import DDPCommunicationHookType, DistributedDataParallelKwargs, GradientAccumulationPlugin, Plan
from accel_precision import AutocastKwargs, GradScalerKwargs, PrecisionPolicy
from accel_state import DistributedType, InitProcessGroupKwargs, PartialState, set_seed, synchronize_rng_states

__all__ = [
    "Checkpointer",
    "ProjectConfiguration",
    "DataLoaderConfiguration",
    "prepare_data_loader",
    "skip_first_batches",
    "DDPCommunicationHookType",
    "DistributedDataParallelKwargs",
    "GradientAccumulationPlugin",
    "Plan",
    "AutocastKwargs",
    "GradScalerKwargs",
    "PrecisionPolicy",
    "DistributedType",
    "InitProcessGroupKwargs",
    "PartialState",
    "set_seed",
    "synchronize_rng_states",
]
