"""Cut the model into a pipeline of stages over ranks (torch's pipelining)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from accel_parallel.materialise import equalise
from accel_parallel.meshes import axis_size
from accel_parallel.pipeline import cutting
from accel_parallel.pipeline.config import PipelineConfig
from accel_parallel.pipeline.model import PipelinedModel
from accel_parallel.plan import PlanContext
from accel_parallel.sizes import format_bytes, parameter_bytes
from accel_state.errors import PlanError


@dataclass(frozen=True)
class Pipelined:
    """Keeps this rank's stages of a model. See `pipelined`."""

    config: PipelineConfig

    name = "pp"
    slot = "pp"
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset({"pipelined"})

    def check(self, model: nn.Module, context: PlanContext, /) -> list[str]:
        """An axis "pp", and a model that can be cut into as many stages."""
        if isinstance(model, PipelinedModel):
            return []
        num_ranks = axis_size(context, "pp")
        if num_ranks == 1:
            return ["there is no axis 'pp' in the mesh: build it by ParallelismConfig(pp_size=...)."]
        if self.config.example is not None or self.config.make_stage is not None:
            return []
        try:
            cutting.cut_chain(model, self.config, self.config.num_stages(num_ranks), ())
        except PlanError as error:
            return [str(error)]
        return []

    def apply(self, model: nn.Module, context: PlanContext, /) -> PipelinedModel:
        """This rank's stages; the rest of the model is let go with the caller's own reference to it."""
        if isinstance(model, PipelinedModel):
            return model
        pp_mesh = context.mesh["pp"]
        num_ranks, rank = pp_mesh.size(), pp_mesh.get_local_rank()
        count, own = self.config.num_stages(num_ranks), self.config.stages_of(rank, num_ranks)
        names = tuple(model.state_dict())
        traced: Any = None
        if self.config.example is not None:
            pipe = cutting.trace(model, self.config, count)
            every = [pipe.get_stage_module(index) for index in range(count)]
            cutting.require_own_parameters(every)
            stages, traced = [every[index] for index in own], pipe.info()
        elif self.config.make_stage is not None:
            stages = [self.config.make_stage(model, index, count) for index in own]
        else:
            stages = cutting.cut_chain(model, self.config, count, own)
        cutting.require_known_names(stages, names)
        cutting.require_what_schedule_needs(stages, self.config)
        held = dict(zip(own, stages, strict=True))
        made = PipelinedModel(held, count, self.config, context.device, pp_mesh.get_group(), type(model), names, traced)
        if axis_size(context, "dp_replicate") > 1 and axis_size(context, "dp_shard") == 1:
            made.replicas = context.mesh["dp_replicate"].get_group()
            for stage in stages:
                stage.to(context.device)
                equalise((*stage.parameters(), *stage.buffers()), made.replicas)
        return made

    def describe(self, model: nn.Module | None, context: PlanContext, /) -> str:
        """How many stages, by which schedule."""
        num_ranks = axis_size(context, "pp")
        count = self.config.num_stages(num_ranks)
        size = "" if model is None else f"parameters ({format_bytes(parameter_bytes(model))}) in "
        return (
            f"{size}{count} stages on {num_ranks} ranks, {self.config.num_microbatches or count} micro-batches by "
            f"{self.config.schedule}; activations and their gradients sent once per cut and micro-batch"
        )


def pipelined(config: PipelineConfig | None = None) -> Pipelined:
    """The step that cuts a model into stages over the ranks of the mesh's axis "pp".

    Later steps of the plan work on each stage of the rank. Batches then pass by `PipelinedModel.forward_backward`.

    Args:
        config: where to cut, and the schedule.
    """
    return Pipelined(config or PipelineConfig())
