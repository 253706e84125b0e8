"""Share sequences over ranks that exchange heads for positions around each attention (Ulysses)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_parallel.attention_routing import RoutedAttention
from accel_parallel.axis_handlers import SP_ATTENTIONS
from accel_parallel.plan import PlanContext
from accel_parallel.sequence_inputs import watch_inputs
from accel_parallel.steps.cp import axis_ranks, missing_axis, own_attention
from accel_parallel.transformers_attention import core_of, implementation_of, missing_interface, use_ulysses
from accel_parallel.ulysses import ulysses_attention


@dataclass(frozen=True)
class SequenceParallel:
    """Lets a model's attention see whole sequences of which ranks hold parts. See `sequence_parallel`."""

    attention: str | None = None

    name = "sp"
    slot = "sp"
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset({"sequence_parallel"})

    def check(self, model: nn.Module, context: PlanContext, /) -> list[str]:
        """A mesh with an axis "sp", an attention that can be shared, and heads that the ranks divide."""
        complaints = missing_axis(context, "sp")
        implementation = implementation_of(model)
        if implementation is None and self.attention not in (None, "sdpa"):
            complaints.append(
                f"attention {self.attention!r} can be chosen for models of the transformers library; of others "
                "scaled_dot_product_attention is shared: leave it out."
            )
        core = None if implementation is None else self.attention or core_of(implementation)
        if core not in (None, *SP_ATTENTIONS):
            complaints.append(
                f"the model's attention is {core!r}, which wants a mask for whole sequences: load it with "
                f"attn_implementation= one of {', '.join(SP_ATTENTIONS)}."
            )
        heads, ranks = getattr(getattr(model, "config", None), "num_attention_heads", None), axis_ranks(context, "sp")
        if isinstance(heads, int) and heads % ranks:
            complaints.append(
                f"{heads} attention heads cannot be dealt to {ranks} ranks: choose an sp size that divides."
            )
        return complaints + missing_interface(model) + own_attention(model)

    def apply(self, model: nn.Module, context: PlanContext, /) -> nn.Module:
        """The same model. Every forward from now on takes this rank's part of sequences."""
        group = context.mesh["sp"].get_group()
        implementation = implementation_of(model)
        if implementation is None:
            _share_attention(model, group)
        else:
            use_ulysses(model, self.attention or core_of(implementation), group)
        rank = dist.get_rank(group)

        def positions(local_length: int, device: torch.device) -> Tensor:
            return torch.arange(rank * local_length, (rank + 1) * local_length, device=device)

        watch_inputs(model, positions, "sp")
        return model

    def describe(self, model: nn.Module | None, context: PlanContext, /) -> str:
        """Over how many ranks, and what is sent."""
        ranks = axis_ranks(context, "sp")
        core = "" if model is None or implementation_of(model) is None else f" ({self._core_of(model)})"
        return (
            f"sequences shared over {ranks} ranks; around each attention{core} queries, keys, values and its result "
            f"are exchanged, {ranks - 1}/{ranks} of each, in forward and backward"
        )

    def _core_of(self, model: nn.Module) -> str | None:
        return self.attention or core_of(implementation_of(model) or "sdpa")


def sequence_parallel(attention: str | None = None) -> SequenceParallel:
    """The step for models whose ranks hold contiguous parts of each sequence (`shard_batch` cuts them).

    Attention is computed over whole sequences, by each rank for some heads. Models of the transformers library keep
    their own function for it, with grouped-query heads; in others every call of `scaled_dot_product_attention` is
    shared. All ranks of the axis have to run every forward together, on parts of the same sequences, in evaluation too.
    Checkpoint whole modules where memory is short, not functions inside them.

    Args:
        attention: for models of the transformers library, one of `axis_handlers.SP_ATTENTIONS`; None takes the model's.

    Cost: four all-to-alls per attention in forward and in backward. In models outside of the transformers library each
    torch function that modules with children call costs a microsecond more.
    """
    return SequenceParallel(attention)


class _SharedAttention:
    """Hooks around modules: attention inside them is shared over the ranks. Nested modules find it on.

    Not only the whole model has them, because what is recomputed for backward is not called through it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.depth = group, 0
        self.mode = RoutedAttention(self.attend, "under sp")

    def enter(self, _module: nn.Module, _args: Any) -> None:
        """Before a module."""
        if self.depth == 0:
            self.mode.__enter__()
        self.depth += 1

    def leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """After it, also after an exception, be it one before `enter`."""
        if self.depth == 1:
            self.mode.__exit__(None, None, None)
        self.depth = max(0, self.depth - 1)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, is_causal: bool, scale: float | None
    ) -> Tensor:
        """torch's attention over whole sequences, for this rank's heads."""

        def attention(q_bntd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor) -> Tensor:
            has_groups = k_bmtd.shape[1] != q_bntd.shape[1]
            return nn.functional.scaled_dot_product_attention(
                q_bntd, k_bmtd, v_bmtd, None, dropout_p, is_causal, scale=scale, enable_gqa=has_groups
            )

        return ulysses_attention(q, k, v, attention, self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _SharedAttention:
        return self  # process groups are not copied


def _share_attention(model: nn.Module, group: dist.ProcessGroup) -> None:
    for module in model.modules():
        hooks = module._forward_pre_hooks.values()  # noqa: SLF001 - no public way
        if any(isinstance(getattr(hook, "__self__", None), _SharedAttention) for hook in hooks):
            return
    shared = _SharedAttention(group)
    for module in model.modules():
        if module is model or (any(module.children()) and not isinstance(module, nn.ModuleList | nn.ModuleDict)):
            module.register_forward_pre_hook(shared.enter)
            module.register_forward_hook(shared.leave, always_call=True)
