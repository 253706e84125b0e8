"""Share parameters over ranks by torch's first FSDP, which wraps modules and keeps their parameters in flat ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from accel_parallel import sharding_units
from accel_parallel.plan import PlanContext
from accel_parallel.sizes import format_bytes, parameter_bytes
from accel_parallel.steps.fsdp2 import group_complaints
from accel_state.errors import AccelError

if TYPE_CHECKING:
    from accel_parallel.fsdp_plugin import FullyShardedDataParallelPlugin

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)  # noqa: SLF001 - its only name


@dataclass(frozen=True)
class Fsdp1:
    """Wraps the model in FullyShardedDataParallel. See `fsdp1`."""

    plugin: FullyShardedDataParallelPlugin

    name = "fsdp1"
    slot = "data_parallel"
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset({"placed", "sharded"})

    def check(self, model: nn.Module, context: PlanContext, /) -> list[str]:
        """Ranks have to be there, units have to exist, and a flat parameter is trained as a whole or not at all."""
        if isinstance(model, FullyShardedDataParallel):
            return []
        complaints = group_complaints(context)
        if context.mesh is not None:
            complaints.append("it does not follow a mesh: use fsdp_version=2.")
        if self.plugin.sharding_strategy in _HYBRID and context.device.type == "cpu":
            complaints.append(
                "the hybrid strategies take their replicas from the accelerators of a machine, and there are none: use "
                "fsdp_version=2 and ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)."
            )
        try:
            inner = self._units(model)
        except AccelError as error:
            return [*complaints, str(error)]
        shared = sharding_units.parameters_in_two_units(model, inner)
        if shared:
            complaints.append(
                f"{', '.join(shared)} is shared between modules of different units: wrap a module that holds all of "
                "them, or only the blocks."
            )
        if not self.plugin.use_orig_params:
            complaints += [
                f"{type(unit).__name__} has trained and frozen parameters, which become one flat parameter: use "
                "use_orig_params=True or fsdp_version=2."
                for unit in (*inner, model)
                if len({p.requires_grad for p in sharding_units.own_parameters(unit, inner)}) > 1
            ][:1]
        return complaints

    def ignored_in(self, model: nn.Module) -> list[nn.Module]:
        """Modules that stay whole on every rank, whose gradients are not reduced."""
        return self.plugin.ignored_in(model)

    def _units(self, model: nn.Module) -> list[nn.Module]:
        return sharding_units.units(model, self.plugin.policy_for(model), self.ignored_in(model))

    def apply(self, model: nn.Module, context: PlanContext, /) -> nn.Module:
        """The wrapped model; one that is wrapped already is returned itself."""
        if isinstance(model, FullyShardedDataParallel):
            return model
        plugin, units = self.plugin, {id(unit) for unit in self._units(model)}
        is_hybrid = plugin.sharding_strategy in _HYBRID
        return FullyShardedDataParallel(
            model,
            process_group=context.process_group if is_hybrid else None,
            device_mesh=None if is_hybrid else _mesh_of(context),  # so that state dicts have DTensors
            sharding_strategy=plugin.sharding_strategy,
            cpu_offload=plugin.cpu_offload,
            auto_wrap_policy=sharding_units.by_predicate(lambda module: id(module) in units) if units else None,
            backward_prefetch=plugin.backward_prefetch,
            mixed_precision=plugin.mixed_precision_policy,
            ignored_modules=plugin.ignored_in(model) or None,
            param_init_fn=plugin.param_init_fn,
            device_id=context.device,
            sync_module_states=bool(plugin.sync_module_states),
            forward_prefetch=bool(plugin.forward_prefetch),
            limit_all_gathers=plugin.limit_all_gathers,
            use_orig_params=bool(plugin.use_orig_params),
        )

    def describe(self, model: nn.Module | None, context: PlanContext, /) -> str:
        """The strategy, and what each rank holds."""
        strategy = self.plugin.sharding_strategy.name
        if model is None:
            return f"{strategy} over {context.world_size} ranks, in flat parameters"
        size = parameter_bytes(model)
        return (
            f"{strategy} over {context.world_size} ranks, parameters ({format_bytes(size)}) in "
            f"{len(self._units(model)) + 1} flat ones"
        )


def _mesh_of(context: PlanContext) -> DeviceMesh:
    kind = context.device.type
    if context.process_group is None:
        return init_device_mesh(kind, (context.world_size,))
    return DeviceMesh.from_group(context.process_group, kind)


def fsdp1(plugin: FullyShardedDataParallelPlugin) -> Fsdp1:
    """The step that the peer's plugin with fsdp_version=1 describes. New work wants `fully_shard_blocks`.

    Cost: per forward and backward an all-gather of each unit, per synchronising backward a reduce-scatter.
    """
    return Fsdp1(plugin)
