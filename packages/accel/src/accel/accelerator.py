"""`Accelerator`: one object that routes to the components which do the work. A reader finds each in one hop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import accel_ckpt
import accel_data
import accel_parallel
import accel_precision
import accel_state
import accel_tracking
from accel_state.settings import UNSET, resolve, setting

from . import checkpoints, configuration, parallelism, preparing
from .facts import Facts
from .handlers import recipe_of, sort_handlers
from .refusals import MEMBERS, MISNAMED, refuse_what_cannot_be_honoured, with_hints
from .state_hooks import StateHooks

if (
    TYPE_CHECKING
):  # the packages' names are fetched when they are used, so that importing this class costs next to nothing
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader
    from torch.utils.hooks import RemovableHandle

    from accel_ckpt import CopyBuffers, ProjectConfiguration, SaveHandle
    from accel_data import DataLoaderConfiguration, DataLoaderShard
    from accel_parallel import (
        AcceleratedOptimizer,
        AcceleratedScheduler,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
    )
    from accel_precision import AORecipeKwargs, AutocastKwargs, GradScalerKwargs, TERecipeKwargs
    from accel_state import InitProcessGroupKwargs
    from accel_tracking import ProfileKwargs, TrackerSet


class Accelerator(Facts):
    """Everything a training loop needs to run on any number of processes, in any precision.

    Arguments that are not given are read from the environment (`accel launch` sets it), then take their defaults.

    Args:
        device_placement: move models, optimizer state and batches to `device`.
        split_batches: deprecated, see `DataLoaderConfiguration`.
        mixed_precision: "no", "fp16", "bf16" or "fp8"; default "no".
        gradient_accumulation_steps: micro-batches per update, used with `accumulate`; default 1.
        cpu: ignore every accelerator. Under a launch of several processes they stay several, and talk over gloo.
        dataloader_config: how loaders are sharded and iterated.
        rng_types: generators that are set to rank 0's at the start of every iteration; default `["generator"]`.
        log_with: trackers by name, class or instance, or "all".
        project_dir: where logs and checkpoints go.
        project_config: the same with naming and limits of checkpoints.
        gradient_accumulation_plugin: accumulation in full.
        step_scheduler_with_optimizer: False moves a prepared scheduler one notch per `step()` call, whatever the
            optimizer does; True only with real updates.
        kwargs_handlers: `AutocastKwargs`, `GradScalerKwargs`, `DistributedDataParallelKwargs`,
            `InitProcessGroupKwargs`, `ProfileKwargs`, at most one of each, and for "fp8" one of `AORecipeKwargs`,
            `TERecipeKwargs`.
        parallelism_config: the mesh: how many ranks each kind of parallelism gets.
        fsdp_plugin: how parameters are shared over ranks; without `parallelism_config`, over all of them.
        torch_tp_plugin: deprecated, `ParallelismConfig(tp_size=...)` says the same.
        dynamo_backend: compile models by this backend of torch.compile; default "no".
        dynamo_plugin: torch.compile in full.
        deepspeed_plugin, deepspeed_plugins, megatron_lm_plugin: refused with the reason: what they configure does not
            exist yet.

    Raises:
        SettingError: a value that is not allowed, a contradiction, or something that cannot be honoured.
    """

    @with_hints
    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = UNSET,  # type: ignore[assignment]
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = UNSET,  # type: ignore[assignment]
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
    ) -> None:
        refuse_what_cannot_be_honoured(locals())
        configuration.check_flags(
            device_placement=device_placement, cpu=cpu, step_scheduler_with_optimizer=step_scheduler_with_optimizer
        )
        handlers = sort_handlers(kwargs_handlers)
        self.init_handler: InitProcessGroupKwargs | None = handlers.get("InitProcessGroupKwargs")
        self.autocast_handler: AutocastKwargs | None = handlers.get("AutocastKwargs")
        self.scaler_handler: GradScalerKwargs | None = handlers.get("GradScalerKwargs")
        self.ddp_handler: DistributedDataParallelKwargs | None = handlers.get("DistributedDataParallelKwargs")
        self.profile_handler: ProfileKwargs | None = handlers.get("ProfileKwargs")

        plugin = configuration.accumulation_plugin(gradient_accumulation_steps, gradient_accumulation_plugin)
        self.dataloader_config = configuration.loader_configuration(split_batches, dataloader_config)
        self.project_configuration = configuration.project_configuration(project_dir, project_config)
        init_kwargs = {} if self.init_handler is None else self.init_handler.to_kwargs()
        choice = parallelism.choose(
            fsdp_plugin, torch_tp_plugin, parallelism_config, resolve("mixed_precision", mixed_precision).value
        )
        self.state = accel_state.AcceleratorState(
            mixed_precision,
            cpu,
            dynamo_plugin=configuration.dynamo_plugin(dynamo_backend, dynamo_plugin),
            fsdp_plugin=choice.fsdp,
            parallelism_config=choice.config,
            _from_accelerator=True,
            **init_kwargs,
        )
        self.state.device_mesh = parallelism.build_mesh(choice.config, self.state)
        self._repeats_samples = parallelism.repeats_samples(self.state)
        self.gradient_state = accel_state.GradientState(plugin)
        self.fp8_recipe_handler = recipe_of(handlers, self.state.mixed_precision)
        self.policy = accel_precision.PrecisionPolicy.from_name(self.state.mixed_precision, self.fp8_recipe_handler)
        self.policy.require(self.device)
        self.ao_recipe_handler: AORecipeKwargs | None = self.policy.recipe_of("AO")
        self.te_recipe_handler: TERecipeKwargs | None = self.policy.recipe_of("TE")
        self.msamp_recipe_handler = None  # MS-AMP is no longer published: its recipe is refused
        self.scaler = self.policy.scaler(
            self.device.type, self.scaler_handler, sharded=parallelism.hides_overflows(choice)
        )
        self.origins = {
            "mixed_precision": resolve("mixed_precision", mixed_precision).origin,
            "gradient_accumulation_steps": (
                resolve("gradient_accumulation_steps", gradient_accumulation_steps).origin
                if gradient_accumulation_plugin is None
                else "plugin"
            ),
            "cpu": resolve("cpu", cpu or UNSET).origin,
        }
        self.device_placement = device_placement
        self.rng_types = configuration.generator_kinds(rng_types)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer

        self.accumulation = accel_parallel.Accumulation(self.gradient_state)
        self.engine = preparing.make_engine(self)
        self._log_with = log_with
        if log_with is not None:
            _ = self.tracker_set  # made now: names that no tracker has are refused here
        self.step = 0
        self.registry = preparing.Registry()
        self.state_hooks = StateHooks(self.registry.models)
        self._models = self.registry.models
        self._optimizers = self.registry.optimizers
        self._schedulers = self.registry.schedulers
        self._dataloaders = self.registry.dataloaders
        self._custom_objects = self.registry.custom_objects
        self._trigger = accel_state.Trigger()
        self._stop_notice = accel_state.StopNotice(setting("time_limit_s"))

    def __getattr__(self, name: str) -> Any:  # only for what is not there
        owner = MEMBERS.get(name)
        hint = "" if owner is None else f": accel does not offer it yet; it belongs to {owner}"
        hint = f": it is {MISNAMED[name]} that is meant" if name in MISNAMED else hint
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    # ------------------------------------------------------------ trackers and buffers, made when they are first needed

    @cached_property
    def tracker_set(self) -> TrackerSet:
        """The trackers of the run, made when they are first needed."""
        return accel_tracking.TrackerSet(self._log_with, self.project_configuration.logging_dir)

    @cached_property
    def copy_buffers(self) -> CopyBuffers:
        """Memory for the copies that saves in the background make, kept from one to the next."""
        return accel_ckpt.CopyBuffers()

    @property
    def trackers(self) -> list[Any]:
        """The trackers that run."""
        return self.tracker_set.trackers

    @property
    def log_with(self) -> list[Any]:
        """The trackers that were asked for."""
        return self.tracker_set.log_with

    def explain(self) -> str:
        """The run as it was resolved: ranks, device, precision, accumulation, and the plan for models."""
        return preparing.explain(self)

    # ------------------------------------------------------------ process control

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorator: run only on rank 0."""
        return accel_state.PartialState().on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorator: run only on rank 0 of each machine."""
        return accel_state.PartialState().on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """Decorator: run only on the highest rank."""
        return accel_state.PartialState().on_last_process(function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorator: run only on one rank."""
        return accel_state.PartialState().on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorator: run only on one rank of each machine."""
        return accel_state.PartialState().on_local_process(function, local_process_index)

    def wait_for_everyone(self) -> None:
        """Wait until every rank is here."""
        self.state.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """A block that rank 0 runs before all others."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """A block that each machine's rank 0 runs before its others."""
        return self.state.local_main_process_first()

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """A block with this rank's contiguous part of a list, tuple, dict or tensor."""
        return self.state.split_between_processes(inputs, apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, once per machine."""
        self.state.print(*args, **kwargs)

    def set_trigger(self) -> None:
        """Make the next `check_trigger` true on every rank."""
        self._trigger.set()

    def check_trigger(self) -> bool:
        """Whether any rank called `set_trigger` since the last check. Every rank calls it; one exchange on the CPU."""
        return self._trigger.check()

    @property
    def should_stop(self) -> bool:
        """Whether to save and leave: after SIGTERM, SIGUSR1 or `--time-limit-s` on any rank, at one update on all.

        Every rank asks once at the end of each update. Leave by `save_state()`, `close()` and
        `sys.exit(STOPPED_EXIT_CODE)`. See `StopNotice`.
        """
        return self._stop_notice.check()

    # ------------------------------------------------------------ preparing

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Models, optimizers, schedulers and loaders made ready for this run, in the order given; a single one bare.

        Objects that are prepared already come back themselves, and objects of other types unchanged.

        Args:
            device_placement: one bool per object; False leaves it on its device.

        Raises:
            SettingError: `device_placement` has another length than there are objects.
            PlanError: a model that cannot be run this way; nothing was changed then.
        """
        return preparing.prepare(self, args, device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """A model on this device, in this precision, and replicated over the ranks.

        Args:
            device_placement: None takes the Accelerator's.
            evaluation_mode: precision alone: no wrapper, no communication.
        """
        return preparing.prepare_model(self, model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """An optimizer that steps when an accumulation window ends."""
        return preparing.prepare_optimizer(self, optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any, *, per: Any = None) -> AcceleratedScheduler:
        """A scheduler that moves with real updates.

        Args:
            per: what the schedule counts, "update" or "sample": see `AcceleratedScheduler`.
        """
        return preparing.prepare_scheduler(self, scheduler, per)

    def prepare_data_loader(
        self, data_loader: DataLoader, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoaderShard:
        """A loader that yields this rank's batches on this device and knows where it stopped."""
        return preparing.prepare_data_loader(self, data_loader, device_placement, slice_fn_for_dispatch)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a device map puts parts of the model in several places; such a model trains on one process only."""
        return accel_parallel.has_several_devices(model)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's model inside a prepared one, which keeps working: see `extract_model_from_parallel`.

        Raises:
            PlanError: a pipelined model, which no rank has as a whole.
        """
        return preparing.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def register_forward_method(self, model: nn.Module, method_name: str) -> None:
        """Make another method of a prepared model run as forward does: under autocast, and its gradients reduced.

        `generate`, `encode` and `decode` run under autocast as soon as a model is prepared; on several ranks they and
        all others have to be registered, since the wrapper hides them. Every rank then has to call the method.

        Args:
            model: as `prepare` returned it.
            method_name: of the method of the model inside, as "encode".

        Raises:
            PlanError: the model has no such method.
        """
        preparing.register_forward_method(self, model, method_name)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The model's whole state; of a sharded or pipelined one on rank 0 alone, elsewhere empty. Every rank calls it.

        Args:
            unwrap: False keeps the names that wrappers give.
        """
        return accel_parallel.full_state_dict(model, unwrap)

    # ------------------------------------------------------------ the step

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """One micro-batch of these models: inside, `sync_gradients` tells whether their window ends here.

        Models that are given together share a window; other models have their own.
        """
        self.step += 1
        return self.accumulation.block(models)

    def backward(self, loss: Tensor, *, num_items: float | Tensor | None = None, **kwargs: Any) -> None:
        """Add the gradients of a micro-batch's mean loss, divided by the accumulation steps and scaled for fp16.

        Args:
            num_items: says that `loss` is a sum over so many items, such as tokens, of this rank. At the window's end
                the gradients are those of the mean over all its items on all ranks, however they were cut.
            kwargs: of `Tensor.backward`.

        Raises:
            PlanError: with and without `num_items` in one window, or twice with it in one micro-step.
        """
        self.engine.backward(loss, num_items=num_items, **kwargs)
        if self.state.num_processes > 1:
            preparing.note_reduction(self)

    def forward_backward(
        self,
        batch: Any,
        loss_function: Callable[[Any, Any], Tensor],
        *,
        target: str = "labels",
        num_items: float | Tensor | None = None,
        model: nn.Module | None = None,
    ) -> Tensor | None:
        """Forward and backward of one batch, through the stages of a pipeline where `pp_size` is above 1.

        Without a pipeline it is what `model(...)`, the loss and `backward` are, so that one script runs both ways.

        Args:
            batch: a tuple or list of the model's arguments and, last, the target; or a dict of its keywords and the
                target.
            loss_function: `loss_function(output, target)`, a mean over the batch; with `num_items` a sum.
            target: the target's key, where the batch is a dict.
            num_items: as in `backward`.
            model: which one, where several are prepared.

        Returns:
            The batch's loss, detached; None on ranks of a pipeline that do not have its last stage.

        Raises:
            SettingError: no model, or several and none named; a batch of another form, or one that cannot be cut into
                equal micro-batches.
        """
        return preparing.forward_backward(self, model, batch, target, loss_function, num_items)

    def no_sync(self, model: nn.Module | None = None) -> AbstractContextManager[Any]:
        """A block whose gradients stay on their rank; without a model, those of all prepared models."""
        return self.engine.no_sync(*([model] if model is not None else self._models))

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[None]:
        """A block whose next backward reduces gradients although its forward ran under `no_sync`."""
        return accel_parallel.trigger_sync_in_backward(model)

    def maybe_context_parallel(
        self,
        buffers: list[Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """A block for one forward and backward in which ranks of the cp axis share sequences; harmless without cp.

        Inside, `buffers` hold this rank's part, and attention sees whole sequences: see `sequence_context`. To be made
        anew for each batch.

        Args:
            buffers: all tensors along the sequence: tokens, labels shifted by one before, positions. They are cut in
                place and restored at the end.
            buffer_seq_dims: the dim of each along which its sequence runs.
            no_restore_buffers: those of `buffers` that stay cut.

        Raises:
            SettingError: numbers of buffers and dims differ, or `no_restore_buffers` has others; it is a ValueError.
            PlanError: sequences that cannot be dealt to the ranks.
        """
        return parallelism.shared_sequences(self.state, buffers, buffer_seq_dims, no_restore_buffers)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """A block that computes in this precision; the handler given here beats the constructor's.

        A prepared model computes in its own precision inside of any block, as the innermost autocast decides in torch.
        """
        return self.policy.autocast(self.device.type, autocast_handler or self.autocast_handler)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the fp16 loss scale, at most once per update; harmless without a scaler.

        Args:
            optimizer: one, a list, or None for all that were prepared.

        Raises:
            NotPreparedError: one was not prepared.
        """
        self.engine.unscale_gradients(optimizer)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the gradients of the update that ends here; inside a window nothing changes.

        Returns:
            The norm before clipping, inside a window that of the gradients so far, as a scalar tensor.
        """
        return self.engine.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp the entries of the gradients of the update that ends here."""
        self.engine.clip_grad_value_(parameters, clip_value)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """A block in which ranks may run out of data at different times. Harmless, with a warning, without DDP.

        Args:
            joinables: DDP models.
            even_batches: overrides that of prepared map-style loaders inside the block; None leaves it.
        """
        return preparing.join_uneven_inputs(self, joinables, even_batches)

    # ------------------------------------------------------------ communication

    def gather(self, tensor: Any) -> Any:
        """Every rank's tensors, joined along their first dimension, in any nesting."""
        return accel_state.gather(tensor)

    def gather_object(self, objects: list[Any]) -> list[Any]:
        """Every rank's list of objects as one list, in rank order."""
        return accel_state.gather_object(objects)

    def broadcast_object_list(self, objects: list[Any], from_process: int = 0) -> list[Any]:
        """One rank's list of objects on every rank, in place."""
        return accel_state.broadcast_object_list(objects, from_process)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """`gather` without the samples that pad the last batch of the loader that is being read.

        Of ranks that share their samples (those of one tp group) only the first counts.
        """
        return accel_data.gather_for_metrics(
            input_data,
            gradient_state=self.gradient_state,
            use_gather_object=use_gather_object,
            is_copy=self._repeats_samples,
        )

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Tensors in any nesting, summed ("sum"), averaged ("mean") or left ("none") over the ranks."""
        return accel_state.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors in any nesting, padded to the longest rank's size along `dim`."""
        return accel_state.pad_across_processes(tensor, dim, pad_index, pad_first)

    # ------------------------------------------------------------ data

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader that begins later, for one epoch; the original still yields its whole epoch."""
        return accel_data.skip_first_batches(dataloader, num_batches)

    # ------------------------------------------------------------ checkpoints

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Make objects part of every checkpoint.

        Raises:
            SettingError: some lack `state_dict` or `load_state_dict`; names all of them, and registers none.
        """
        self._custom_objects.extend(checkpoints.checked(objects))

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str | SaveHandle:
        """Write everything needed to continue, as one transaction. Every rank calls it, at an update's end.

        Args:
            output_dir: the checkpoint's directory; with automatic naming it is `checkpoints/checkpoint_<iteration>` in
                the project's directory instead, and a directory given warns. On every node, with
                `ProjectConfiguration(save_on_each_node=True)`.
            safe_serialization: False writes the peer's files in torch's format (`pytorch_model.bin`, …), which are read
                weights-only; sharded models cannot be saved so.
            blocking: False returns as soon as a private copy of the state exists. One such save is in flight at most:
                the next save or load waits for it and raises what it failed with.
            save_model_func_kwargs: none is known to the functions that write; any is an error.

        Returns:
            The directory that was written, or a handle to wait for.

        Raises:
            CheckpointError: it could not be written; the last checkpoint is intact.
        """
        return checkpoints.save_state(self, output_dir, safe_serialization, blocking, save_model_func_kwargs)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        strict: bool = True,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Continue from a checkpoint of any number of ranks. Every rank calls it, after `prepare`.

        Args:
            input_dir: the checkpoint's directory, ours or the peer's; None means the newest one under automatic naming
                that is whole. Numbers go on above all that are there.
            load_kwargs, load_model_func_kwargs: `map_location` ("cpu" or "on_device") and `weights_only=True` hold
                whether given or not: tensors go where the objects have theirs. Any other is an error.
            strict: False loads what fits and warns of the rest.

        Raises:
            CheckpointNotFoundError: there is none; it is also a FileNotFoundError.
            CheckpointCorruptError, CheckpointMismatchError: nothing was changed.
        """
        checkpoints.load_state(self, input_dir, strict, load_kwargs, load_model_func_kwargs)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights for any reader, wholly or not at all. Every rank calls it.

        Args:
            model: prepared or bare.
            max_shard_size: of the tensors in one file, in bytes or as "5MB"; a single larger weight has its own file.
            safe_serialization: safetensors; False writes torch's format.

        Raises:
            CheckpointError: it could not be written; the weights that were there are intact.
        """
        checkpoints.save_model(self, model, save_directory, max_shard_size, safe_serialization)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write any object to a file, once, wholly or not at all. Every rank calls it.

        Args:
            safe_serialization: safetensors, of a dict of tensors; False writes torch's format.

        Raises:
            CheckpointError: it could not be written; a file that was there is intact.
        """
        accel_ckpt.save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` at every `save_state`, on every rank, before it reads any state.

        Files that it writes into `output_dir` belong to the checkpoint: the directory is still being filled, and gets
        its name when all is written. `models` are the prepared ones, `weights` their state dicts, without wrappers'
        prefixes: what the hook changes there is what is written, and what it pops is not.

        Returns:
            A handle; its `remove()` takes the hook away.
        """
        return self.state_hooks.on_save(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` at every `load_state`, on every rank, once the checkpoint is verified.

        A model that the hook pops from `models` is not loaded; it stays prepared.

        Returns:
            A handle; its `remove()` takes the hook away.
        """
        return self.state_hooks.on_load(hook)

    # ------------------------------------------------------------ trackers

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers, on the main process.

        Args:
            config: recorded by each.
            init_kwargs: tracker's name to further arguments.
        """
        self.tracker_set.init(project_name, config, init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        reduce: str | None = None,
    ) -> None:
        """Log values with every tracker; a tracker that fails never stops the training.

        Args:
            values: name to value.
            step: the update that they belong to.
            log_kwargs: tracker's name to further arguments of its `log`.
            reduce: "mean", "sum", "min" or "max" of each number over all ranks, which then all call this: one
                collective. None logs rank 0's.
        """
        self.tracker_set.log(values, step, log_kwargs, reduce)

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        dataformats: str = "NCHW",
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log pictures with every tracker that shows them.

        Args:
            values: name to a tensor or array of bytes, or of numbers from 0 to 1.
            step: the update that they belong to.
            dataformats: what the axes mean, for example "NCHW", "NHWC", "CHW" or "HW".
            log_kwargs: tracker's name to further arguments of its `log_images`.
        """
        self.tracker_set.log_images(values, step, dataformats, log_kwargs)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log a table, `columns` and `data` or a pandas `dataframe`, with every tracker that shows tables."""
        self.tracker_set.log_table(table_name, columns, data, dataframe, step, log_kwargs)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[torch.profiler.profile]:
        """A block under torch's profiler, which it yields; Chrome traces per rank only with `output_trace_dir`.

        Args:
            profile_handler: how; None takes that of `kwargs_handlers`, and without one the defaults.
        """
        return accel_tracking.profile(profile_handler or self.profile_handler, self.process_index)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by name, or with `unwrap` its library's own object; off the main process a null object."""
        return self.tracker_set.get(name, unwrap)

    def end_training(self) -> None:
        """Wait for saves in the background, finish the trackers, leave the process group. Harmless a second time."""
        checkpoints.wait_for_saves(self)
        self.tracker_set.finish()
        self._stop_notice.close()
        self.state.destroy_process_group()

    def close(self) -> None:
        """`end_training`, by the name that `contextlib.closing` calls."""
        self.end_training()

    # ------------------------------------------------------------ letting go

    def free_memory(self, *objects: Any) -> Any:
        """Let go of every prepared object, collect garbage, empty the device's cache, and count from 0 again.

        Returns:
            One None per argument: `model, optimizer = accelerator.free_memory(model, optimizer)`.
        """
        return preparing.free_memory(self, objects)

    def clear(self, *objects: Any) -> Any:
        """`free_memory` by its other name."""
        return self.free_memory(*objects)
