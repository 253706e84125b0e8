"""The loop of plain torch: autograd's backward, the optimizer's own step."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_parallel import clipping, item_weights, kept_gradients
from accel_parallel.dispatch.device_maps import has_several_devices
from accel_parallel.engines.base import Prepared
from accel_parallel.meshes import axis_size, data_parallel_size, loss_group, loss_size
from accel_parallel.optimizer import AcceleratedOptimizer, Scaler
from accel_parallel.plan import Plan, PlanContext, is_pipelined
from accel_parallel.repointing import Replacements
from accel_parallel.scheduler import AcceleratedScheduler, Unit
from accel_parallel.sync import no_sync
from accel_parallel.unwrap import class_before_sharding, extract_model_from_parallel, inside_compiled
from accel_state import GradientState
from accel_state.errors import NotPreparedError, PlanError
from accel_state.protocols import Stateful


class NativeEngine:
    """Prepares by a plan and leaves the loop to torch.

    Args:
        plan: applied to each model.
        context: where.
        gradient_state: the accumulation's mailbox; the current one if None.
        scaler: of the loss, for fp16; anything with `scale`, `unscale_`, `step` and `update`.
        step_scheduler_with_optimizer, split_batches, scheduler_unit: see `AcceleratedScheduler`.
    """

    def __init__(
        self,
        plan: Plan,
        context: PlanContext,
        *,
        gradient_state: GradientState | None = None,
        scaler: Scaler | None = None,
        step_scheduler_with_optimizer: bool = True,
        split_batches: bool = False,
        scheduler_unit: Unit | None = None,
    ) -> None:
        self.plan, self.context, self.scaler = plan, context, scaler
        self.gradient_state = GradientState() if gradient_state is None else gradient_state
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.split_batches, self.scheduler_unit = split_batches, scheduler_unit
        self.optimizers: list[AcceleratedOptimizer] = []
        self._replacements = Replacements()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._outside = item_weights.ItemWindow(one_per_step=False)

    # ---- preparing

    def prepare(self, objects: Prepared) -> Prepared:
        """Apply the plan to the models and wrap optimizers and schedulers, in place of the originals.

        Raises:
            PlanError: a model that the plan cannot be applied to; no model was changed then.
        """
        for model in objects.models:
            self.plan.validate(model, self.context)
        models = tuple(self.prepare_model(model) for model in objects.models)
        optimizers = tuple(self.prepare_optimizer(optimizer) for optimizer in objects.optimizers)
        schedulers = tuple(self.prepare_scheduler(scheduler) for scheduler in objects.schedulers)
        return Prepared(models=models, optimizers=optimizers, schedulers=schedulers)

    def prepare_model(self, model: nn.Module, plan: Plan | None = None) -> nn.Module:
        """The model by the engine's plan, or another one. Which parameters were replaced is noted for optimizers.

        Raises:
            PlanError: several ranks, and the model was dispatched over several devices.
        """
        if self.context.world_size > 1 and has_several_devices(model):
            raise PlanError(
                "a model dispatched by a device_map over several devices cannot be trained by several processes: "
                "load it without device_map, or start one process"
            )
        chosen = self.plan if plan is None else plan
        prepared = self._replacements.follow(model, lambda: chosen.apply(model, self.context))
        self._models.add(inside_compiled(prepared))
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool = True) -> AcceleratedOptimizer:
        """The wrapped optimizer, one for each inner one and bound to this run; that of another run is wrapped anew.

        One that was made before its model was sharded trains the parameters that took the old ones' place.

        Raises:
            PlanError: it cannot be made to.
        """
        wrapped = optimizer if isinstance(optimizer, AcceleratedOptimizer) else None
        inner = optimizer if wrapped is None else wrapped.optimizer
        for known in self.optimizers:
            if known.optimizer is inner:
                return known
        self._replacements.repoint(inner)
        if wrapped is None or wrapped.gradient_state is not self.gradient_state:
            wrapped = AcceleratedOptimizer(inner, device_placement, self.scaler, gradient_state=self.gradient_state)
        self.optimizers.append(wrapped)
        return wrapped

    def prepare_scheduler(self, scheduler: Any, per: Unit | None = None) -> AcceleratedScheduler:
        """The wrapped scheduler, bound to its own optimizer if that was prepared here, else to all that were.

        One of another run is wrapped anew.

        Args:
            per: the unit that it counts in; the engine's by default.
        """
        if isinstance(scheduler, AcceleratedScheduler):
            if scheduler.gradient_state is self.gradient_state:
                return scheduler
            scheduler = scheduler.scheduler
        inner = getattr(scheduler, "optimizer", None)
        own = [known for known in self.optimizers if inner is known or inner is known.optimizer]
        return AcceleratedScheduler(
            scheduler,
            own or list(self.optimizers),
            self.step_scheduler_with_optimizer,
            self.split_batches,
            per=per or self.scheduler_unit,
            num_processes=data_parallel_size(self.context),
            gradient_state=self.gradient_state,
        )

    def release(self) -> None:
        """Let go of the optimizers."""
        self.optimizers.clear()

    # ---- the loop

    def backward(self, loss: Tensor, *, num_items: float | Tensor | None = None, **kwargs: Any) -> None:
        """Add the gradients of a micro-batch.

        Args:
            loss: mean over the micro-batch, divided here by the accumulation's steps in every micro-batch alike; with
                `num_items` the sum over it.
            num_items: how many items, such as tokens, this rank's sum has. When the window ends the gradients are those
                of the mean over all its items on all ranks, as of one big batch. A window without any leaves zeros.
            kwargs: of `Tensor.backward`.

        Raises:
            PlanError: with and without `num_items` in one window, or twice with it in one micro-step of a block.
            SettingError: `num_items` is not a number from 0.

        Cost: gradients are reduced over ranks if the window ends here; with `num_items` also the counts, 4 bytes.
        """
        if num_items is None:
            self._scaled_by_steps()(loss).backward(**kwargs)
        else:
            self._backward_of_sum(lambda scaled: scaled(loss).backward(**kwargs), num_items)

    def forward_backward(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        loss_function: Callable[[Any, Any], Tensor],
        num_items: float | Tensor | None = None,
    ) -> Tensor | None:
        """Forward and backward of one batch; through the stages of a pipeline, where it has to be one call.

        Args:
            model: prepared.
            args, kwargs: of its forward.
            target, loss_function: the loss is `loss_function(output, target)`: a mean, or with `num_items` a sum.
            num_items: as in `backward`; of the whole batch.

        Returns:
            The batch's loss, detached; None on ranks of a pipeline that do not have its last stage.

        Cost: see `PipelinedModel.forward_backward`. Replicas of stages reduce gradients in every micro-step.
        """
        if not is_pipelined(model):
            loss = loss_function(model(*args, **kwargs), target)
            self.backward(loss, num_items=num_items)
            return loss.detach()
        stages = cast(Any, model)
        run = functools.partial(stages.forward_backward, args, kwargs, target, loss_function)
        if num_items is None:
            scaled, parts = self._scaled_by_steps(), stages.num_microbatches
            losses = run(lambda loss: scaled(loss / parts))
            return None if losses is None else losses.mean()
        found: list[Tensor | None] = []
        self._backward_of_sum(lambda scaled: found.append(run(scaled)), num_items)
        return None if found[0] is None else found[0].sum()

    def _scaled_by_steps(self) -> Callable[[Tensor], Tensor]:
        """What becomes of a loss that is a mean over its micro-batch."""
        window = self.gradient_state.window or self._outside
        window.note_mean()
        if window is self._outside and self.gradient_state.sync_gradients:
            window.begin()
        num_steps, scaler = self.gradient_state.num_steps, self.scaler

        def scaled(loss: Tensor) -> Tensor:
            if num_steps != 1:
                loss = loss / num_steps
            return loss if scaler is None else scaler.scale(loss)

        return scaled

    def _backward_of_sum(self, run: Callable[[Callable[[Tensor], Tensor]], None], num_items: float | Tensor) -> None:
        """In a window of several micro-steps the total is known at its end alone: gradients are multiplied then, once,
        after they were reduced. A window of one knows it beforehand, and its loss is.
        """
        window = self.gradient_state.window or self._outside
        holds_sums = window.add(item_weights.as_items(num_items, self.context.device))
        scale = (lambda value: value) if self.scaler is None else self.scaler.scale
        if not self.gradient_state.sync_gradients:
            run(scale)
            return
        assert window.items is not None
        divisor, group = self._reduction
        total, pending = item_weights.start_total(window.items, group)
        if holds_sums:
            run(scale)
        if pending is not None:
            pending.wait()
        factor = item_weights.factor_for(total, divisor)
        if holds_sums:
            item_weights.scale_gradients(window.models or tuple(self._models), factor)
        else:
            run(lambda loss: scale(loss * factor.to(loss.device)))
        if window is self._outside:
            window.begin()

    @functools.cached_property
    def _reduction(self) -> tuple[int, dist.ProcessGroup | None]:
        """By how much the plan's reduction divides gradients, and over which ranks it reduces them."""
        if not any(step.slot in ("data_parallel", "pp") for step in self.plan.steps):
            return 1, None
        return loss_size(self.context), loss_group(self.context)

    @functools.cached_property
    def _stages(self) -> dist.ProcessGroup | None:
        """The ranks that hold other stages of the same models."""
        return self.context.mesh["pp"].get_group() if axis_size(self.context, "pp") > 1 else None

    def no_sync(self, *models: nn.Module) -> AbstractContextManager[Any]:
        """A block whose gradients stay on the rank."""
        return no_sync(*models)

    def unscale_gradients(self, optimizers: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Divide gradients by the loss scale, at most once per update; nothing without a scaler or inside a window.

        Args:
            optimizers: one, several, or None for all that were prepared; wrapped ones, or those inside them.

        Raises:
            NotPreparedError: one was not prepared, so nothing is known about its scale.
        """
        if self.scaler is None:
            return
        if optimizers is None:
            optimizers = self.optimizers
        elif isinstance(optimizers, Optimizer):
            optimizers = [optimizers]
        for wrapped in [self._wrapped(optimizer) for optimizer in optimizers]:
            wrapped.unscale_gradients()

    def _wrapped(self, optimizer: Optimizer) -> AcceleratedOptimizer:
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        for known in self.optimizers:
            if known.optimizer is optimizer:
                return known
        raise NotPreparedError(
            f"unscale_gradients got a {type(optimizer).__name__} that was not prepared: pass what prepare() returned "
            "for it."
        )

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of the update that ends here, after unscaling them.

        Inside an accumulation window nothing is changed.

        Returns:
            The norm before clipping; inside a window that of what this rank has accumulated so far, which under
            sharding are whole gradients too.

        Raises:
            PlanError: a part of the parameters of a model under FSDP version 1.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self.gradient_state.sync_gradients:
            return self._norm_so_far(parameters, norm_type)
        self._unscale_owners(parameters)
        flat = clipping.flat_model_of(parameters, self._models)
        if flat is not None:
            flat_norm: Tensor = flat.clip_grad_norm_(max_norm, norm_type)
            return flat_norm
        return clipping.clip_grad_norm_(parameters, max_norm, norm_type, stages=self._stages)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp the entries of the gradients of the update that ends here, after unscaling them."""
        if not self.gradient_state.sync_gradients:
            return
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._unscale_owners(parameters)
        clipping.clip_grad_value_(parameters, clip_value)

    def _norm_so_far(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        norm = clipping.norm_of(kept_gradients.so_far(parameters, self._models), norm_type)
        if self._stages is not None:
            norm = clipping.over_stages(norm, norm_type, self._stages)
        if self.scaler is None:
            return norm
        scale: Tensor = self.scaler.scale(torch.ones((), device=norm.device))  # stays on the device, unlike get_scale
        return norm / scale

    def _unscale_owners(self, parameters: Sequence[Tensor]) -> None:
        """Another model's optimizer may still wait for its own backward, so only those concerned are unscaled."""
        if self.scaler is None:
            return
        wanted = {id(parameter) for parameter in parameters}
        for optimizer in self.optimizers:
            if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"]):
                optimizer.unscale_gradients()

    # ---- checkpoints

    def state(self, prepared: Prepared) -> Mapping[str, Stateful]:
        """Models without wrappers, optimizers, schedulers and the scaler, each named by its class and ordinal."""
        inner: list[Any] = [
            *(extract_model_from_parallel(model, keep_torch_compile=False) for model in prepared.models),
            *(getattr(optimizer, "optimizer", optimizer) for optimizer in prepared.optimizers),
            *(getattr(scheduler, "scheduler", scheduler) for scheduler in prepared.schedulers),
        ]
        if self.scaler is not None:
            inner.append(self.scaler)
        seen: Counter[str] = Counter()
        named: dict[str, Stateful] = {}
        for item in inner:
            kind = class_before_sharding(item).__name__
            named[f"{kind}-{seen[kind]}"] = item
            seen[kind] += 1
        return named
