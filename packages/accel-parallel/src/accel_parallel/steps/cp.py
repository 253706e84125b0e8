"""Share sequences over ranks whose keys and values travel (context parallelism, ring attention)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel_parallel.context_block import open_context
from accel_parallel.plan import PlanContext
from accel_parallel.sequence_inputs import watch_inputs
from accel_parallel.transformers_attention import (
    CONTEXT_PARALLEL,
    implementation_of,
    missing_interface,
    use_context_parallel,
)
from accel_state.errors import PlanError


@dataclass(frozen=True)
class ContextParallel:
    """Makes a model ready for `sequence_context`. See `context_parallel`."""

    rotation: str = "allgather"

    name = "cp"
    slot = "cp"
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset({"sequence_parallel"})

    def check(self, model: nn.Module, context: PlanContext, /) -> list[str]:
        """A mesh with an axis "cp", and attention by `scaled_dot_product_attention`."""
        complaints = missing_axis(context, "cp")
        implementation = implementation_of(model)
        if implementation not in (None, "sdpa", CONTEXT_PARALLEL):
            complaints.append(
                f"the model's attention is {implementation!r}, and only torch's can be shared: load it with "
                "attn_implementation='sdpa'."
            )
        return complaints + missing_interface(model) + own_attention(model)

    def apply(self, model: nn.Module, _context: PlanContext, /) -> nn.Module:
        """The same model. A transformers model gets an attention by another name, and positions where it has none."""
        if implementation_of(model) == "sdpa":
            use_context_parallel(model)
        watch_inputs(model, _positions_in_context, "cp", _uncut)
        if not any(_require_attention in module._forward_hooks.values() for module in model.modules()):  # noqa: SLF001
            model.register_forward_hook(_require_attention)
        return model

    def describe(self, _model: nn.Module | None, context: PlanContext, /) -> str:
        """Over how many ranks, and how."""
        ranks = axis_ranks(context, "cp")
        how = {"allgather": "gathered from all ranks", "alltoall": "passed on from rank to rank"}[self.rotation]
        who = "torch's context_parallel" if context.device.type == "cuda" else "ring attention"
        return (
            f"sequences shared over {ranks} ranks inside maybe_context_parallel; keys and values {how} per attention, "
            f"{ranks - 1}/{ranks} of them, twice that in backward ({who})"
        )


def context_parallel(rotation: str = "allgather") -> ContextParallel:
    """The step for models that train inside `sequence_context`, in which each rank holds a part of each sequence.

    Gradients of parts are averaged over the cp axis by the steps `ddp` and `fully_shard_blocks`. A rank's mean is not
    that of all tokens where parts hold unequally many labels, as they do after a shift: sum the loss over the labels,
    and divide by their number on all ranks times the ranks.

    Args:
        rotation: how keys and values travel, for `explain`; the context decides.

    Cost: nothing outside of the context; inside, see `ring_attention`.
    """
    return ContextParallel(rotation)


def missing_axis(context: PlanContext, axis: str) -> list[str]:
    """Why there are no ranks to share sequences with; empty if there are."""
    if context.mesh is None or axis not in (context.mesh.mesh_dim_names or ()):
        return [f"there is no axis {axis!r} in the mesh: build it by ParallelismConfig({axis}_size=...)."]
    return []


def axis_ranks(context: PlanContext, axis: str) -> int:
    """The size of an axis for explanations; 1 where it is missing."""
    return 1 if missing_axis(context, axis) else int(context.mesh[axis].size())


def own_attention(model: nn.Module) -> list[str]:
    """Modules that compute attention in a way that cannot be shared."""
    found = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    if not found:
        return []
    return [
        f"{found[0] or 'the model'} is a torch.nn.MultiheadAttention, which computes the scores of this rank's tokens "
        "by itself: use a module that calls scaled_dot_product_attention."
    ]


def _positions_in_context(local_length: int, device: torch.device) -> Tensor | None:
    context = open_context()
    return None if context is None else context.positions(local_length, device)


def _uncut(buffer: Any) -> Any:
    context = open_context()
    return buffer if context is None else context.originals.get(id(buffer), buffer)


def _require_attention(module: nn.Module, _args: Any, _output: Any) -> None:
    context = open_context()
    if context is not None and context.attention_calls == 0:
        raise PlanError(
            f"{type(module).__name__} ran under cp and called no scaled_dot_product_attention, so its attention, if it "
            "has one, saw only this rank's tokens: compute it by torch.nn.functional.scaled_dot_product_attention"
        )
