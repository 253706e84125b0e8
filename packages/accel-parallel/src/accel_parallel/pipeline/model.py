"""What a rank holds of a pipelined model, and how batches pass through it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.stage import build_stage

from accel_parallel.pipeline.config import PipelineConfig
from accel_parallel.pipeline.replicas import average_gradients
from accel_parallel.unwrap import inner_model
from accel_state.errors import PlanError, SettingError

_SCHEDULES: Mapping[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
}
_KEPT_SCHEDULES = 8  # one per shape of batches: the usual one, evaluation's, and last batches

LossFunction = Callable[[Any, Any], Tensor]


def _as_it_is(loss: Tensor) -> Tensor:
    return loss


class PipelinedModel(nn.Module):
    """This rank's stages of a model. Parameters keep the names that they have in the whole model.

    Args:
        stages: index to stage, those of this rank.
        num_stages: on all ranks.
        config: the schedule.
        device: of this rank.
        group: the ranks of the pipeline.
        model_class: of the whole model.
        state_names: all names of the whole model's state, in its order.
        traced: torch's description of a traced model, whose stages exchange more than one tensor.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        num_stages: int,
        config: PipelineConfig,
        device: torch.device,
        group: dist.ProcessGroup,
        model_class: type,
        state_names: Sequence[str],
        traced: Any = None,
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages.values())
        self.stage_indices = list(stages)
        self.num_stages, self.config, self.device, self.group = num_stages, config, device, group
        self.model_class, self._traced = model_class, traced
        self.state_names = tuple(state_names)
        self._place = {name: number for number, name in enumerate(self.state_names)}
        self._schedules: dict[Any, Any] = {}
        self._loss_function: LossFunction = _as_it_is  # type: ignore[assignment]
        self._transform: Callable[[Tensor], Tensor] = _as_it_is
        self._losses: list[Tensor] = []
        self.replicas: dist.ProcessGroup | None = None  # ranks that hold the same stages, whose gradients are averaged
        self._is_paused = False

    @property
    def has_first(self) -> bool:
        """Whether batches enter here."""
        return self.stage_indices[0] == 0

    @property
    def has_last(self) -> bool:
        """Whether outputs and losses are here."""
        return self.stage_indices[-1] == self.num_stages - 1

    @property
    def num_microbatches(self) -> int:
        """Equal parts that a batch is cut into."""
        return self.config.num_microbatches or self.num_stages

    # ---- running

    def forward_backward(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        loss_function: LossFunction,
        transform: Callable[[Tensor], Tensor] = _as_it_is,
    ) -> Tensor | None:
        """One batch forward and backward through all stages. Every rank of the pipeline calls it with the same batch.

        Args:
            args, kwargs: of the model.
            target: of the loss; its first dimension is the batch, as that of all tensors.
            loss_function: `loss_function(output, target)` of one micro-batch.
            transform: what each micro-batch's loss becomes before its backward.

        Returns:
            The micro-batches' losses, one each, where the last stage is; None elsewhere.

        Raises:
            SettingError: the batch cannot be cut into equal micro-batches.

        Cost: activations and their gradients travel once per cut and micro-batch; gradients of replicas are reduced
        after that, and those of sharded stages in every call.
        """
        self._loss_function, self._transform = loss_function, transform
        schedule = self._schedule(args, kwargs, target)
        schedule.step(
            *(args if self.has_first else ()),
            target=target if self.has_last else None,
            return_outputs=False,
            **(kwargs if self.has_first else {}),
        )
        if self.replicas is not None and not self._is_paused:
            average_gradients(self.parameters(), self.replicas)
        losses = self._losses[-self.num_microbatches :]  # before them, torch finds shapes by a first one of its own
        self._losses = []
        return torch.stack([loss.detach() for loss in losses]) if self.has_last else None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which gradients of replicas stay apart."""
        outer, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = outer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of a batch where the last stage is, without gradients; None elsewhere. All ranks call it.

        Raises:
            PlanError: torch has no schedule without backward for stages that lie in a V.
        """
        if self.config.schedule == "zbv_zero_bubble":
            raise PlanError(
                "a pipeline of schedule='zbv_zero_bubble' cannot run forward alone: use 'interleaved_zero_bubble', or "
                "evaluate by forward_backward's losses"
            )
        with torch.no_grad():
            schedule = self._schedule(args, kwargs, None)
            return schedule.step(*(args if self.has_first else ()), **(kwargs if self.has_first else {}))

    def _loss(self, output: Any, target: Any) -> Tensor:
        loss = self._loss_function(output, target)
        self._losses.append(loss)
        return self._transform(loss)

    def _schedule(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Any:
        """Torch's schedule for batches of these shapes, which it fixes at its first batch."""
        self._losses = []
        tensors = [value for value in (*args, *kwargs.values(), target) if isinstance(value, Tensor)]
        for tensor in tensors:
            if tensor.ndim == 0 or tensor.shape[0] % self.num_microbatches:
                raise SettingError(
                    f"a batch with a tensor of shape {tuple(tensor.shape)} cannot be cut into {self.num_microbatches} "
                    "equal micro-batches along its first dimension: let num_microbatches divide the batch size, and "
                    "use drop_last=True"
                )
        has_backward = target is not None
        key = (has_backward, *(tuple(tensor.shape) for tensor in tensors))
        if key not in self._schedules:
            while len(self._schedules) >= _KEPT_SCHEDULES:
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[key] = self._new_schedule(has_backward)
        return self._schedules[key]

    def _new_schedule(self, has_backward: bool) -> Any:
        stages = [self._torch_stage(index, stage) for index, stage in zip(self.stage_indices, self.stages, strict=True)]
        kind = _SCHEDULES[self.config.schedule]
        if not has_backward:
            kind = ScheduleGPipe if len(stages) == 1 else ScheduleInterleaved1F1B
        held = stages[0] if len(stages) == 1 else stages
        return kind(held, self.num_microbatches, loss_fn=self._loss if has_backward else None, scale_grads=False)

    def _torch_stage(self, index: int, stage: nn.Module) -> Any:
        if self._traced is None:
            return PipelineStage(stage, index, self.num_stages, self.device, group=self.group)
        return build_stage(stage, index, self._traced, self.device, self.group)

    # ---- the whole model's names

    def _bare(self) -> list[nn.Module]:
        return [inner_model(stage) for stage in self.stages]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by their names in the whole model, a tied one by the first that it has there."""
        found = [pair for stage in self._bare() for pair in stage.named_parameters("", recurse, False)]
        found.sort(key=lambda pair: self._place.get(pair[0], len(self._place)))
        seen: set[nn.Parameter] = set()
        for name, parameter in found:
            if parameter not in seen or not remove_duplicate:
                seen.add(parameter)
                yield f"{prefix}.{name}" if prefix else name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """This rank's buffers by their names in the whole model."""
        for stage in self._bare():
            yield from stage.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """This rank's part of the whole model's state, without what tracing added to it."""
        states = [stage.state_dict(*args, **kwargs) for stage in self._bare()]
        items = [item for state in states for item in state.items() if item[0] in self._place]
        whole: OrderedDict[str, Any] = OrderedDict(sorted(items, key=lambda item: self._place[item[0]]))
        whole._metadata = {  # type: ignore[attr-defined] # noqa: SLF001 - where modules keep their states' versions
            prefix: values for state in states for prefix, values in getattr(state, "_metadata", {}).items()
        }
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's part of a state of the whole model, or of this part alone.

        Raises:
            PlanError: `strict`, and a part of this rank is missing.
        """
        missing = [name for name in self.state_dict() if name not in state_dict]
        if missing and strict:
            raise PlanError(f"the state lacks {', '.join(missing[:5])} of the stages on this rank")
        for stage in self._bare():
            part = OrderedDict((name, state_dict[name]) for name in stage.state_dict() if name in state_dict)
            part._metadata = getattr(state_dict, "_metadata", {})  # type: ignore[attr-defined] # noqa: SLF001
            stage.load_state_dict(part, strict=False, assign=assign)
        return nn.modules.module._IncompatibleKeys(missing, [])  # noqa: SLF001 - what a module's load_state_dict returns

    def __getstate__(self) -> dict[str, Any]:
        raise PlanError("a pipelined model holds a part of a model and its connections: save its state_dict() instead")
