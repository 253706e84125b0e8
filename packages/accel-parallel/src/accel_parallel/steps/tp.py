"""Share single matrices over ranks (torch's tensor parallelism)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, SequenceParallel, parallelize_module

from accel_parallel.materialise import equalise, has_meta
from accel_parallel.plan import PlanContext
from accel_parallel.sizes import format_bytes
from accel_parallel.tp_styles import complaints, resolve_plan, shared_dimension, tied_names
from accel_state.errors import PlanError


@dataclass(frozen=True)
class TensorParallel:
    """Shares matrices in place. See `tensor_parallel`."""

    plan: Any = None

    name = "tp"
    slot = "tp"
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset({"tensor_parallel"})

    def check(self, model: nn.Module, context: PlanContext, /) -> list[str]:
        """A mesh with an axis "tp", a plan that fits the model, and sizes that divide."""
        if is_tensor_parallel(model):
            return []
        mesh = context.mesh
        if mesh is None or "tp" not in (mesh.mesh_dim_names or ()):
            return ["there is no axis 'tp' in the mesh: build it by ParallelismConfig(tp_size=...)."]
        try:
            styles = resolve_plan(model, self.plan)
        except PlanError as error:
            return [str(error)]
        found = complaints(model, styles, mesh["tp"].size())
        if has_meta(model):
            found.append("the model lies on the meta device: load it, or call to_empty and initialise it, before.")
        return found

    def apply(self, model: nn.Module, context: PlanContext, /) -> nn.Module:
        """The same model, with DTensors where matrices are shared; one that is shared already comes back as it is."""
        if is_tensor_parallel(model):
            return model
        mesh: DeviceMesh = context.mesh["tp"]
        ties = tied_names(model)
        parallelize_module(model, mesh, dict(resolve_plan(model, self.plan)))
        for first, *others in ties:
            for name in others:
                _set_parameter(model, name, model.get_parameter(first))
        whole = [tensor for tensor in (*model.parameters(), *model.buffers()) if _is_whole(tensor)]
        equalise(whole, mesh.get_group())  # or the ranks' copies would part for ever
        return model

    def describe(self, model: nn.Module | None, context: PlanContext, /) -> str:
        """How much is shared; each rowwise module sums its output once in forward, each colwise one in backward."""
        mesh = context.mesh
        ranks = mesh["tp"].size() if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) else 1
        if model is None:
            return f"matrices shared over {ranks} ranks"
        styles = resolve_plan(model, self.plan)
        shared = {name: style for name, style in styles.items() if _shares(model, name, style)}
        size = sum(p.numel() * p.element_size() for n in shared for p in model.get_submodule(n).parameters(False))
        rowwise = sum(isinstance(style, RowwiseParallel) for style in shared.values())
        return (
            f"{len(shared)} modules ({format_bytes(size)}) shared over {ranks} ranks; {rowwise} sums of activations in "
            "forward, as many as there are colwise inputs in backward"
        )


def _shares(model: nn.Module, name: str, style: ParallelStyle) -> bool:
    return not isinstance(style, SequenceParallel) and shared_dimension(model.get_submodule(name), style) is not None


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether parameters are DTensors on an axis "tp", be it by this step or by transformers."""
    return any(isinstance(p, DTensor) and "tp" in (p.device_mesh.mesh_dim_names or ()) for p in model.parameters())


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, parameter)


def _is_whole(tensor: Tensor) -> bool:
    """Whether every rank of the group holds all of it; shared matrices were dealt out by one rank."""
    return not isinstance(tensor, DTensor) or all(placement.is_replicate() for placement in tensor.placements)


def tensor_parallel(plan: Any = None) -> TensorParallel:
    """The step that shares matrices over the ranks of the mesh's axis "tp".

    Args:
        plan: module names, with shell wildcards, to words of `accel_parallel.tp_styles.STYLES` or torch's styles; or a
            function that gives such a plan for a model. None takes the model's own `tp_plan`, as transformers has it.
            Modules that are not named stay whole on every rank.

    Modules must not count on the number of heads: reshape by the head's width, `unflatten(-1, (-1, head_width))`.
    Ranks of one tp group need the same batches and, for dropout outside shared matrices, the same seeds.

    Cost: an all-reduce of activations per rowwise module in forward and per colwise input in backward.
    """
    return TensorParallel(plan)
