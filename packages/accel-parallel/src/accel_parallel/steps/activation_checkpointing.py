"""Compute activations of blocks anew in backward instead of keeping them (torch's non-reentrant checkpoint)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from accel_parallel import sharding_units
from accel_parallel.plan import PlanContext
from accel_parallel.unwrap import written_forward
from accel_state.errors import AccelError, SettingError

if TYPE_CHECKING:
    from accel_parallel.fsdp_plugin import FullyShardedDataParallelPlugin

MODES = ("full", "selective")

_aten = torch.ops.aten
_exchanges = getattr(torch.ops, "_c10d_functional")  # noqa: B009 - operators that torch lists under such names
EXPENSIVE_OPS: tuple[Any, ...] = (
    *(getattr(_aten, name).default for name in ("mm", "addmm", "bmm", "convolution")),
    *(
        getattr(_aten, f"_scaled_dot_product_{kind}").default
        for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    ),
    *(getattr(_exchanges, name).default for name in ("reduce_scatter_tensor", "all_to_all_single")),
)
"""What the selective mode keeps: matrices, attention and exchanges, which cost more time than their results memory."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """Changes the forward of blocks, in place. See `activation_checkpointing`."""

    mode: str
    blocks_of: Callable[[nn.Module], list[nn.Module]]
    every: int
    keep_ops: tuple[Any, ...]
    offload: bool

    name = "activation_checkpointing"
    slot = "activation_checkpointing"
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset({"checkpointed"})

    def check(self, model: nn.Module, _context: PlanContext, /) -> list[str]:
        """There have to be blocks, and only one of model and plan may do it."""
        complaints = []
        if getattr(model, "is_gradient_checkpointing", False):
            complaints.append(
                "the model checkpoints its blocks itself: call model.gradient_checkpointing_disable(), or leave this "
                "step out."
            )
        try:
            blocks = self.blocks_of(model)
        except AccelError as error:
            return [*complaints, str(error)]
        if not blocks:
            complaints.append("no module was chosen: name the modules to checkpoint, with shell wildcards.")
        return complaints

    def apply(self, model: nn.Module, context: PlanContext, /) -> nn.Module:
        """The same model; names, classes and state dicts stay as they are."""
        pin = context.device.type != "cpu"
        for block in self._chosen(model):
            if not is_checkpointed(block):
                run: Any = _run_offloaded if self.offload else _run
                options = {"pin_memory": pin} if self.offload else {}
                block.forward = _Forward(run, block.forward, context_fn=self._contexts(), **options)
        return model

    def describe(self, model: nn.Module | None, _context: PlanContext, /) -> str:
        """How many blocks, and what is kept of them."""
        kept = "all but matrices and attention" if self.mode == "selective" else "activations"
        if model is None:
            return f"{kept} of the blocks computed anew in backward"
        blocks = self.blocks_of(model)
        there = ", inputs kept on the CPU" if self.offload else ""
        return f"{kept} of {len(blocks[:: self.every])} of {len(blocks)} blocks computed anew in backward{there}"

    def _chosen(self, model: nn.Module) -> list[nn.Module]:
        return self.blocks_of(model)[:: self.every]

    def _contexts(self) -> Callable[[], Any] | None:
        return partial(create_selective_checkpoint_contexts, list(self.keep_ops)) if self.mode == "selective" else None


class _Forward(partial[Any]):
    """A block's checkpointed forward; its class tells that it is."""


def is_checkpointed(block: nn.Module) -> bool:
    """Whether this step changed the block's forward."""
    return isinstance(written_forward(block), _Forward)


def _run(forward: Callable[..., Any], *args: Any, context_fn: Any, **kwargs: Any) -> Any:
    options = {} if context_fn is None else {"context_fn": context_fn}
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _run_offloaded(forward: Callable[..., Any], *args: Any, context_fn: Any, pin_memory: bool, **kwargs: Any) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
        return _run(forward, *args, context_fn=context_fn, **kwargs)


def activation_checkpointing(
    mode: str = "full",
    *,
    wrap: sharding_units.Wrap = "blocks",
    every: int = 1,
    keep_ops: Collection[Any] = EXPENSIVE_OPS,
    offload: bool = False,
) -> ActivationCheckpointing:
    """The step that trades time for memory.

    Args:
        mode: "full" keeps a block's inputs alone, about a third more time; "selective" also the results of `keep_ops`.
        wrap: which modules: "blocks" are the model's repeated ones; names with shell wildcards; a number of parameters
            from which a module counts; a function of a module; None the model as one.
        every: take every n-th block, the first among them.
        keep_ops: operators (`torch.ops.aten.mm.default`) whose results the selective mode keeps.
        offload: keep what remains on the CPU until backward; it costs two copies.

    Raises:
        SettingError: a mode that does not exist, or `every` below 1.
    """
    if mode not in MODES:
        raise SettingError(f"activation checkpointing by mode={mode!r} does not exist: use one of {', '.join(MODES)}")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise SettingError(f"every={every!r}: give a whole number from 1, where 1 takes all blocks")
    return ActivationCheckpointing(
        mode=mode,
        blocks_of=partial(sharding_units.chosen, wrap=wrap),
        every=every,
        keep_ops=tuple(keep_ops),
        offload=offload,
    )


def checkpointing_of(plugin: FullyShardedDataParallelPlugin) -> ActivationCheckpointing:
    """The step that `plugin.activation_checkpointing` asks for: the units that it shards, or the model's blocks."""

    def blocks_of(model: nn.Module) -> list[nn.Module]:
        policy = plugin.policy_for(model)
        return sharding_units.chosen(model, "blocks" if policy is None else policy)

    offload = bool(plugin.activation_checkpointing_offload)
    return ActivationCheckpointing(mode="full", blocks_of=blocks_of, every=1, keep_ops=(), offload=offload)
