"""accel: the training-loop library for PyTorch. `Accelerator` is the whole; each part is a package of its own."""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from .accelerator import Accelerator as Accelerator
    from .names import AutocastKwargs as AutocastKwargs
    from .names import Checkpointer as Checkpointer
    from .names import DataLoaderConfiguration as DataLoaderConfiguration
    from .names import DDPCommunicationHookType as DDPCommunicationHookType
    from .names import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from .names import DistributedType as DistributedType
    from .names import GradientAccumulationPlugin as GradientAccumulationPlugin
    from .names import GradScalerKwargs as GradScalerKwargs
    from .names import InitProcessGroupKwargs as InitProcessGroupKwargs
    from .names import PartialState as PartialState
    from .names import Plan as Plan
    from .names import PrecisionPolicy as PrecisionPolicy
    from .names import ProjectConfiguration as ProjectConfiguration
    from .names import prepare_data_loader as prepare_data_loader
    from .names import set_seed as set_seed
    from .names import skip_first_batches as skip_first_batches
    from .names import synchronize_rng_states as synchronize_rng_states

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "accelerator": ["Accelerator"],
        "names": [
            "PartialState",
            "DistributedType",
            "ProjectConfiguration",
            "DataLoaderConfiguration",
            "GradientAccumulationPlugin",
            "AutocastKwargs",
            "GradScalerKwargs",
            "DistributedDataParallelKwargs",
            "DDPCommunicationHookType",
            "InitProcessGroupKwargs",
            "Checkpointer",
            "Plan",
            "PrecisionPolicy",
            "prepare_data_loader",
            "set_seed",
            "skip_first_batches",
            "synchronize_rng_states",
        ],
    },
)
