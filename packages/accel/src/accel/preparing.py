"""What `Accelerator.prepare` does: sort objects by type, hand them to the engine and the loaders, keep the order."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data

import accel_data
import accel_parallel
import accel_precision
import accel_state
from accel_state.errors import PlanError, SettingError

from .parallelism import batch_transform

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.utils.data import DataLoader

    from accel_ckpt import Checkpointer, SaveHandle
    from accel_data import DataLoaderShard
    from accel_parallel import AcceleratedOptimizer, AcceleratedScheduler, NativeEngine, Plan, PlanContext

    from .accelerator import Accelerator


@dataclass(frozen=True, kw_only=True)
class Registry:
    """What an Accelerator holds for the run: objects in order, which `free_memory` lets go, and saves under way."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    dataloaders: list[Any] = field(default_factory=list)
    custom_objects: list[Any] = field(default_factory=list)
    checkpointers: dict[Path, Checkpointer] = field(default_factory=dict)
    pending_saves: list[SaveHandle] = field(default_factory=list)

    def clear(self) -> None:
        """Let go of the objects."""
        for held in (self.models, self.optimizers, self.schedulers, self.dataloaders, self.custom_objects):
            held.clear()


def make_engine(accelerator: Accelerator) -> NativeEngine:
    """The loop of plain torch with the plan that models are prepared by."""
    return accel_parallel.NativeEngine(
        model_plan(accelerator, place=accelerator.device_placement, evaluation_mode=False),
        plan_context(accelerator),
        gradient_state=accelerator.gradient_state,
        scaler=accelerator.scaler,
        step_scheduler_with_optimizer=accelerator.step_scheduler_with_optimizer,
        split_batches=accelerator.dataloader_config.split_batches,
    )


def plan_context(accelerator: Accelerator) -> PlanContext:
    """This rank's device, and the mesh or the ranks that it trains with."""
    state = accelerator.state
    context = accel_parallel.PlanContext(device=state.device, world_size=state.num_processes, mesh=state.device_mesh)
    return replace(context, process_group=None if state.device_mesh is None else accel_parallel.loss_group(context))


def model_plan(accelerator: Accelerator, *, place: bool, evaluation_mode: bool) -> Plan:
    """The steps that this run asks for: placement, 8-bit layers, sharing or replication over ranks, precision."""
    steps: list[Any] = []
    plugin, config = accelerator.state.fsdp_plugin, accelerator.state.parallelism_config
    if config is not None and config.pp_enabled:
        steps.append(accel_parallel.pipelined(config.pp_handler))
    if plugin is None or evaluation_mode:
        steps.append(accel_parallel.single(move=place))
    if accelerator.policy.fp8 is not None:
        steps.append(accel_precision.fp8_step(accelerator.policy.fp8))
    if config is not None and config.tp_enabled:
        steps.append(accel_parallel.tensor_parallel(config.tp_handler.plan))
    if config is not None and config.cp_enabled:
        steps.append(accel_parallel.context_parallel(config.cp_handler.cp_comm_strategy))
    if config is not None and config.sp_enabled:
        steps.append(accel_parallel.sequence_parallel(config.sp_handler.sp_attn_implementation))
    compiling = accel_parallel.compiling_of(accelerator.state.dynamo_plugin)
    if not evaluation_mode and plugin is not None and plugin.activation_checkpointing:
        steps.append(accel_parallel.checkpointing_of(plugin))
    if compiling is not None and compiling.slot == "compile_blocks":
        steps.append(compiling)
    if not evaluation_mode:
        if plugin is not None:
            steps.append(accel_parallel.fsdp2(plugin) if plugin.fsdp_version == 2 else accel_parallel.fsdp1(plugin))
        elif accelerator.use_distributed and (config is None or (config.loss_dim_names and not config.pp_enabled)):
            steps.append(accel_parallel.ddp(accelerator.ddp_handler))
    if compiling is not None and compiling.slot == "compile":
        steps.append(compiling)
    steps.append(accel_precision.autocast_step(accelerator.policy, accelerator.autocast_handler))
    return accel_parallel.Plan(steps)


def explain(accelerator: Accelerator) -> str:
    """The resolved run in words, and who said so."""
    state, origins = accelerator.state, accelerator.origins
    lines = [
        f"rank {state.process_index} of {state.num_processes} on {state.device} "
        f"({state.distributed_type.value}; cpu by {origins['cpu']})",
        f"mixed precision: {accelerator.mixed_precision} ({origins['mixed_precision']})",
        f"micro-batches per update: {accelerator.gradient_accumulation_steps} "
        f"({origins['gradient_accumulation_steps']})",
        f"models: {accelerator.engine.plan.explain(context=accelerator.engine.context)}",
    ]
    return "\n".join(lines)


# ---------------------------------------------------------------- prepare


def prepare(accelerator: Accelerator, objects: Sequence[Any], device_placement: Sequence[bool] | None) -> Any:
    """Prepare models first, since optimizers follow them, then optimizers, then the rest; return in the order given."""
    if device_placement is None:
        placements: list[bool | None] = [None] * len(objects)
    elif len(device_placement) == len(objects):
        placements = list(device_placement)
    else:
        raise SettingError(
            f"device_placement has {len(device_placement)} entries for {len(objects)} objects: give one bool per object"
        )
    if accelerator.state.fsdp_plugin is not None and False in placements:
        raise SettingError(
            "device_placement=False is not possible under FSDP, which places what it shares: leave device_placement out"
        )
    results = list(objects)
    for is_kind, prepare_one in (
        (is_model, prepare_model),
        (is_optimizer, prepare_optimizer),
        (is_loader, prepare_data_loader),
        (is_scheduler, _prepare_scheduler),
    ):
        for index, item in enumerate(objects):
            if is_kind(item):
                results[index] = prepare_one(accelerator, item, placements[index])
    for before, after in zip(objects, results, strict=True):
        if before is after and not any(test(before) for test in (is_model, is_optimizer, is_loader, is_scheduler)):
            accel_state.get_logger("accel").debug(
                "prepare() passes an object of type %s through unchanged", type(before).__name__
            )
    return results[0] if len(results) == 1 else tuple(results)


def is_model(item: Any) -> bool:
    """Whether `prepare` treats it as a model."""
    return isinstance(item, torch.nn.Module)


def is_optimizer(item: Any) -> bool:
    """Whether `prepare` treats it as an optimizer."""
    return isinstance(item, torch.optim.Optimizer)


def is_loader(item: Any) -> bool:
    """Whether `prepare` treats it as a loader."""
    return isinstance(item, torch.utils.data.DataLoader)


def is_scheduler(item: Any) -> bool:
    """Whether `prepare` treats it as a scheduler: torch's, or anything that steps an optimizer's rates alike."""
    if isinstance(item, torch.optim.lr_scheduler.LRScheduler | accel_parallel.AcceleratedScheduler):
        return True
    return not isinstance(item, torch.nn.Module | torch.optim.Optimizer | torch.utils.data.DataLoader) and all(
        callable(getattr(item, name, None)) for name in ("step", "get_last_lr", "state_dict", "load_state_dict")
    )


def _require(holds: bool, item: Any, function: str, wanted: str) -> None:
    if not holds:
        raise SettingError(f"{function} takes {wanted}, and got {item!r} of type {type(item).__name__}")


def prepare_model(
    accelerator: Accelerator, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
) -> nn.Module:
    """Apply the plan to one model and remember it."""
    _require(is_model(model), model, "prepare_model", "a torch.nn.Module")
    bare = accel_parallel.inner_model(model)
    for known in accelerator.registry.models:
        if accel_parallel.inner_model(known) is bare:
            return known  # prepared already, be it by the wrapper or by what is inside
    if any(accel_parallel.is_pipelined(known) for known in accelerator.registry.models):
        raise PlanError(
            f"a second model, a {type(model).__name__}, under pp_size above 1: a schedule runs stages of one model. "
            "Make both parts of one model, or prepare this one by an Accelerator without pp"
        )
    place = accelerator.device_placement if device_placement is None else device_placement
    plan = model_plan(accelerator, place=place, evaluation_mode=evaluation_mode)
    prepared = accelerator.engine.prepare_model(model, plan)
    accelerator.registry.models.append(prepared)
    return prepared


def unwrap_model(model: nn.Module, keep_fp32_wrapper: bool, keep_torch_compile: bool) -> nn.Module:
    """The user's model inside a prepared one.

    Raises:
        PlanError: no rank has it.
    """
    if accel_parallel.is_pipelined(model):
        raise PlanError(
            "unwrap_model cannot give back a pipelined model, of which this rank has only some stages (model.stages). "
            "The whole state is what get_state_dict(model) gives on rank 0, and save_model(model, directory) writes"
        )
    unwrapped: nn.Module = accel_parallel.extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)
    return unwrapped


def forward_backward(
    accelerator: Accelerator, model: nn.Module | None, batch: Any, target: str, loss_function: Any, num_items: Any
) -> torch.Tensor | None:
    """Take the batch apart and let the engine run it."""
    models = accelerator.registry.models
    if model is None:
        if len(models) != 1:
            raise SettingError(
                f"forward_backward cannot tell which of {len(models)} prepared models is meant: give model="
            )
        model = models[0]
    if isinstance(batch, Mapping) and target in batch:
        kwargs = {key: value for key, value in batch.items() if key != target}
        args, wanted = [], batch[target]
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        (*args, wanted), kwargs = batch, {}
    else:
        raise SettingError(
            f"forward_backward got a batch of type {type(batch).__name__}: give a tuple (arguments..., target), or a "
            f"dict with the target under {target!r}"
        )
    return accelerator.engine.forward_backward(model, tuple(args), kwargs, wanted, loss_function, num_items)


def register_forward_method(accelerator: Accelerator, model: nn.Module, name: str) -> None:
    """Route a method through the model's wrapper, and run it in this run's precision."""
    _require(is_model(model), model, "register_forward_method", "a torch.nn.Module")
    accel_parallel.route_method(model, name)
    inner = accel_parallel.inner_model(model)
    accelerator.policy.wrap(inner, accelerator.device.type, handler=accelerator.autocast_handler, method=name)


def prepare_optimizer(
    accelerator: Accelerator, optimizer: Any, device_placement: bool | None = None
) -> AcceleratedOptimizer:
    """Wrap one optimizer and remember it."""
    _require(is_optimizer(optimizer), optimizer, "prepare_optimizer", "a torch.optim.Optimizer")
    place = accelerator.device_placement if device_placement is None else device_placement
    prepared = accelerator.engine.prepare_optimizer(optimizer, place)
    if not _known(accelerator.registry.optimizers, prepared):
        accelerator.registry.optimizers.append(prepared)
    return prepared


def prepare_scheduler(accelerator: Accelerator, scheduler: Any, per: Any = None) -> AcceleratedScheduler:
    """Wrap one scheduler and remember it."""
    what = "a learning-rate scheduler with step, get_last_lr, state_dict and load_state_dict"
    _require(is_scheduler(scheduler), scheduler, "prepare_scheduler", what)
    for known in accelerator.registry.schedulers:
        if scheduler is known.scheduler:
            return known
    prepared = accelerator.engine.prepare_scheduler(scheduler, per=per)
    if not _known(accelerator.registry.schedulers, prepared):
        accelerator.registry.schedulers.append(prepared)
    return prepared


def _prepare_scheduler(
    accelerator: Accelerator, scheduler: Any, _device_placement: bool | None
) -> AcceleratedScheduler:
    return prepare_scheduler(accelerator, scheduler)


def prepare_data_loader(
    accelerator: Accelerator,
    loader: DataLoader,
    device_placement: bool | None = None,
    slice_fn_for_dispatch: Any = None,
) -> DataLoaderShard:
    """Shard one loader and remember it."""
    known = accelerator.registry.dataloaders
    if isinstance(loader, accel_data.DataLoaderShard):
        if loader.gradient_state is None:
            loader.gradient_state = accelerator.gradient_state  # cut by its owner, and now part of this run
        if loader.gradient_state is accelerator.gradient_state:
            if not _known(known, loader):
                known.append(loader)
                loader.ranks_will_meet = partial(_will_meet, weakref.ref(accelerator.registry))
                loader.transform = batch_transform(accelerator.state)
            return loader
        loader = loader.base_dataloader  # of another run: cut anew, as this one's settings say
    config = accelerator.dataloader_config
    place = accelerator.device_placement if device_placement is None else device_placement
    prepared = accel_data.prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        split_batches=config.split_batches,
        put_on_device=place,
        rng_types=list(accelerator.rng_types),
        dispatch_batches=config.dispatch_batches,
        even_batches=config.even_batches,
        slice_fn_for_dispatch=slice_fn_for_dispatch,
        use_seedable_sampler=config.use_seedable_sampler,
        data_seed=config.data_seed,
        non_blocking=config.non_blocking,
        use_stateful_dataloader=config.use_stateful_dataloader,
        torch_device_mesh=accelerator.state.device_mesh,
        gradient_state=accelerator.gradient_state,
    )
    prepared.ranks_will_meet = partial(_will_meet, weakref.ref(accelerator.registry))
    prepared.transform = batch_transform(accelerator.state)
    known.append(prepared)
    return prepared


def note_reduction(accelerator: Accelerator) -> None:
    """Tell the loader being read that this backward waited for all ranks, so none of them may go on alone."""
    loader = accelerator.gradient_state.active_dataloader
    if loader is not None and not getattr(loader, "ranks_met", True):
        loader.ranks_met = any(accel_parallel.waits_for_ranks(model) for model in accelerator.registry.models)


def _will_meet(registry: weakref.ref[Registry]) -> bool:
    """Whether models stand ready for a backward that waits for all ranks: every rank answers the same."""
    held = registry()
    models = [] if held is None else held.models
    return torch.is_grad_enabled() and any(
        model.training and accel_parallel.waits_for_ranks(model, in_any_step=True) for model in models
    )


@contextmanager
def join_uneven_inputs(accelerator: Accelerator, joinables: Sequence[Any], even_batches: bool | None) -> Iterator[None]:
    """torch's `Join` for the models, and for the prepared loaders what they need to end unevenly."""
    loaders = accelerator.registry.dataloaders
    with accel_data.uneven_inputs(loaders, even_batches), accel_parallel.join_uneven_inputs(joinables):
        yield


def _known(known: Sequence[Any], item: Any) -> bool:
    return any(item is other for other in known)


# ---------------------------------------------------------------- letting go


def free_memory(accelerator: Accelerator, objects: Sequence[Any]) -> Any:
    """Drop every reference the Accelerator holds; see `Accelerator.free_memory`."""
    accelerator.registry.clear()
    accelerator.engine.release()
    accelerator.accumulation.reset()
    accelerator.step = 0
    gc.collect()
    accel_state.device_kind(accelerator.device.type).empty_cache()
    return None if not objects else (None,) * len(objects)
