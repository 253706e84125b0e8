"""Share parameters, gradients and optimizer state over ranks (torch's `fully_shard`), with replicas if wanted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from accel_parallel import sharding_units
from accel_parallel.materialise import Init, equalise, fill_from_rank_0, must_be_filled
from accel_parallel.meshes import axis_size, fsdp_mesh
from accel_parallel.plan import PlanContext
from accel_parallel.sizes import format_bytes, parameter_bytes
from accel_state.errors import PlanError

if TYPE_CHECKING:
    from accel_parallel.fsdp_plugin import FullyShardedDataParallelPlugin


@dataclass(frozen=True, kw_only=True)
class Fsdp2:
    """Shards a model in place. See `fully_shard_blocks`."""

    policy_for: Callable[[nn.Module], sharding_units.WrapPolicy | None]
    ignored_in: Callable[[nn.Module], Collection[nn.Module]]
    mixed_precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard_after_forward: bool
    from_rank_0: bool
    init: Init | None

    name = "fsdp2"
    slot = "data_parallel"
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset({"placed", "sharded"})

    def check(self, model: nn.Module, context: PlanContext, /) -> list[str]:
        """Ranks have to be there, units have to exist, and no parameter may belong to two of them."""
        if isinstance(model, FSDPModule):
            return []
        complaints = group_complaints(context)
        try:
            inner = self._units(model)
        except PlanError as error:
            return [*complaints, str(error)]
        shared = sharding_units.parameters_in_two_units(model, inner)
        if shared:
            complaints.append(
                f"{', '.join(shared)} is shared between modules of different units: let one unit hold all of them, or "
                "leave them to the root by wrapping only the blocks."
            )
        mixed = [
            unit
            for unit in (*inner, model)
            if len({p.dtype for p in sharding_units.own_parameters(unit, inner) if p.requires_grad}) > 1
        ]
        if mixed:
            complaints.append(
                f"trained parameters of {type(mixed[0]).__name__} have several dtypes, which are gathered together: "
                "convert the model to one before."
            )
        bare = [unit for unit in (*inner, model) if isinstance(unit, nn.ModuleList | nn.ModuleDict)]
        if bare:
            complaints.append(
                f"a {type(bare[0]).__name__} has no forward, before which its parameters could be gathered: wrap the "
                "modules inside it, or the one that holds it."
            )
        if self.from_rank_0 and axis_size(context, "tp") > 1:
            complaints.append("weights from rank 0 alone cannot be shared by tp: load them on every rank.")
        return complaints

    def _units(self, model: nn.Module) -> list[nn.Module]:
        return sharding_units.units(model, self.policy_for(model), self.ignored_in(model))

    def apply(self, model: nn.Module, context: PlanContext, /) -> nn.Module:
        """The same model, whose parameters are DTensors now; one that is sharded already is returned as it is."""
        if isinstance(model, FSDPModule):
            return model
        mesh = fsdp_mesh(context)
        ignored = {p for module in self.ignored_in(model) for p in module.parameters()}
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": self.mixed_precision, "offload_policy": self.offload}
        is_filled = must_be_filled(model, self.from_rank_0, self.init, context.device)
        for unit in (*self._units(model), model):
            if is_filled:
                fill_from_rank_0(unit, self.init, context.device)
            reshard = self.reshard_after_forward if unit is not model else None  # the root is needed again at once
            fully_shard(unit, reshard_after_forward=reshard, ignored_params=ignored, **options)
        for parameter in ignored:
            parameter.data = parameter.data.to(context.device)
        if not is_filled and mesh.ndim == 2:
            equalise((*model.parameters(), *model.buffers()), mesh.get_group(0))  # replicas begin alike, as DDP's do
        return model

    def describe(self, model: nn.Module | None, context: PlanContext, /) -> str:
        """What each rank holds, and what is sent per update: gathering twice and reducing once, each (n-1)/n."""
        ranks = _sharing_ranks(context)
        copies = axis_size(context, "dp_replicate")
        over = f"{ranks} rank{'s' if ranks > 1 else ''}" + (f", {copies} replicas" if copies > 1 else "")
        if model is None:
            return f"parameters, gradients and optimizer state shared over {over}"
        whole = parameter_bytes(model)
        gathers = 2 if self.reshard_after_forward else 1
        sent = (gathers + 1) * whole * (ranks - 1) / ranks
        return (
            f"parameters ({format_bytes(whole)}) shared over {over}, {format_bytes(whole / ranks)} each, in "
            f"{len(self._units(model)) + 1} units; {format_bytes(sent)} sent per rank and update"
        )


def group_complaints(context: PlanContext) -> list[str]:
    """Why there are no ranks to share with; empty if there are."""
    if not dist.is_initialized():
        return [
            "there is no process group to shard over: start the script by a launcher (one process will do) and create "
            "PartialState() first."
        ]
    if context.mesh is None and dist.get_world_size() != context.world_size:
        return [
            f"the context says {context.world_size} ranks, the process group has {dist.get_world_size()}: pass a mesh."
        ]
    return []


def _sharing_ranks(context: PlanContext) -> int:
    if context.mesh is None:
        return context.world_size
    if context.mesh.mesh_dim_names is None:
        return int(context.mesh.mesh.shape[-1])
    return axis_size(context, "dp_shard") * axis_size(context, "cp") * axis_size(context, "sp")


def fully_shard_blocks(
    wrap: sharding_units.Wrap = "blocks",
    *,
    mixed_precision: MixedPrecisionPolicy | None = None,
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
    ignored: Collection[nn.Module] = (),
    from_rank_0: bool = False,
    param_init_fn: Init | None = None,
) -> Fsdp2:
    """The step that shares parameters over the ranks of the mesh's dp_shard, cp and sp axes.

    With a dp_replicate axis each replica is shared so (HSDP), and replicas begin with the first one's values.

    Args:
        wrap: which modules are gathered and freed by themselves. "blocks": the model's repeated ones. Names of modules,
            with shell wildcards. A number: modules from so many parameters. A function of a module, or one of torch's
            policies. None: the model as one unit.
        mixed_precision: torch's policy; None computes and reduces in the parameters' dtype.
        cpu_offload: keep parameters, gradients and optimizer state on the CPU.
        reshard_after_forward: free gathered parameters between forward and backward.
        ignored: modules that stay whole on every rank. Their gradients are not reduced.
        from_rank_0: only rank 0 has the weights; the other ranks' models may lie on the meta device.
        param_init_fn: gives values to a module that lies on the meta device, on rank 0.

    Cost: per forward and backward an all-gather of each unit, per synchronising backward a reduce-scatter.
    """

    return Fsdp2(
        policy_for=lambda model: sharding_units.policy_of(model, wrap),
        ignored_in=lambda _model: ignored,
        mixed_precision=mixed_precision or MixedPrecisionPolicy(),
        offload=CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
        reshard_after_forward=reshard_after_forward,
        from_rank_0=from_rank_0,
        init=param_init_fn,
    )


def fsdp2(plugin: FullyShardedDataParallelPlugin) -> Fsdp2:
    """The step that the peer's plugin with fsdp_version=2 describes."""
    return Fsdp2(
        policy_for=plugin.policy_for,
        ignored_in=plugin.ignored_in,
        mixed_precision=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        offload=plugin.cpu_offload,
        reshard_after_forward=plugin.reshard_after_forward,
        from_rank_0=bool(plugin.cpu_ram_efficient_loading),
        init=plugin.param_init_fn,
    )
