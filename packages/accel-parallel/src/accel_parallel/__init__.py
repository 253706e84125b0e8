"""Parallelism for PyTorch as an ordered plan of small, checkable steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from .accumulation import Accumulation as Accumulation
    from .accumulation import GradientAccumulationPlugin as GradientAccumulationPlugin
    from .clipping import clip_grad_norm_ as clip_grad_norm_
    from .clipping import clip_grad_value_ as clip_grad_value_
    from .clipping import total_norm as total_norm
    from .ddp_kwargs import DDPCommunicationHookType as DDPCommunicationHookType
    from .ddp_kwargs import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from .engines.base import Engine as Engine
    from .engines.base import Prepared as Prepared
    from .engines.native import NativeEngine as NativeEngine
    from .entry_points import route_method as route_method
    from .optimizer import AcceleratedOptimizer as AcceleratedOptimizer
    from .optimizer import move_to_device as move_to_device
    from .plan import SLOTS as SLOTS
    from .plan import Plan as Plan
    from .plan import PlanContext as PlanContext
    from .plan import Step as Step
    from .scheduler import AcceleratedScheduler as AcceleratedScheduler
    from .steps.ddp import ddp as ddp
    from .steps.single import single as single
    from .sync import join_uneven_inputs as join_uneven_inputs
    from .sync import no_sync as no_sync
    from .sync import trigger_sync_in_backward as trigger_sync_in_backward
    from .unwrap import extract_model_from_parallel as extract_model_from_parallel
    from .unwrap import is_compiled_module as is_compiled_module

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "plan": ["Plan", "PlanContext", "Step", "SLOTS"],
        "steps.single": ["single"],
        "steps.ddp": ["ddp"],
        "engines.base": ["Engine", "Prepared"],
        "engines.native": ["NativeEngine"],
        "optimizer": ["AcceleratedOptimizer", "move_to_device"],
        "scheduler": ["AcceleratedScheduler"],
        "accumulation": ["Accumulation", "GradientAccumulationPlugin"],
        "ddp_kwargs": ["DistributedDataParallelKwargs", "DDPCommunicationHookType"],
        "clipping": ["clip_grad_norm_", "clip_grad_value_", "total_norm"],
        "entry_points": ["route_method"],
        "sync": ["no_sync", "trigger_sync_in_backward", "join_uneven_inputs"],
        "unwrap": ["extract_model_from_parallel", "is_compiled_module"],
    },
)
