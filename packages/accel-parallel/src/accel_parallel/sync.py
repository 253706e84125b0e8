"""When gradients are reduced over ranks: not yet, now, or for as long as a rank still has data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from accel_state import warn_user
from accel_state.errors import PlanError

from .arguments import require_models
from .plan import is_pipelined
from .unwrap import inside_compiled, is_compiled_module


def pause_of(model: nn.Module) -> Callable[[], AbstractContextManager[None]] | None:
    """What makes a context in which `model` does not reduce its gradients; None where nothing has to be paused.

    Looked up once per model, so that a micro-step only calls it.
    """
    if is_compiled_module(model):
        return pause_of(inside_compiled(model))
    if isinstance(model, DistributedDataParallel | FullyShardedDataParallel) or is_pipelined(model):
        return model.no_sync  # type: ignore[return-value]
    if isinstance(model, FSDPModule):
        return lambda: _pause_sharded(model)
    return None


@contextmanager
def _pause_sharded(model: FSDPModule) -> Iterator[None]:
    """`fully_shard` has a switch instead of a context; it keeps whole gradients meanwhile."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def waits_for_ranks(model: nn.Module, *, in_any_step: bool = False) -> bool:
    """Whether a backward of `model` waits for all ranks: this one, or with `in_any_step` any that may come.

    Models that are sharded gather their parameters in every forward, whether or not they reduce gradients.
    """
    inner = inside_compiled(model)
    if isinstance(inner, FSDPModule | FullyShardedDataParallel) or is_pipelined(inner):
        return True
    if in_any_step:
        return hasattr(inner, "require_backward_grad_sync")
    return bool(getattr(inner, "require_backward_grad_sync", False))


def no_sync(*models: nn.Module) -> AbstractContextManager[Any]:
    """A block whose forward and backward passes leave gradients local to the rank; harmless on models of one rank.

    Cost: none; the next backward outside reduces what has accumulated.
    """
    require_models("no_sync", models)
    pauses = [pause for pause in map(pause_of, models) if pause is not None]
    if not pauses:
        return nullcontext()
    stack = ExitStack()
    for pause in pauses:
        stack.enter_context(pause())
    return stack


@contextmanager
def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
    """A block whose next backward reduces gradients although its forward ran under `no_sync`.

    After two forwards under `no_sync`, `backward(a)` outside and `backward(b)` in this block leave the mean over ranks
    of both gradients. Harmless without DistributedDataParallel.

    Args:
        model: as prepared. All its trained parameters have to take part in the backward.

    Raises:
        PlanError: DDP was made with find_unused_parameters=True, so it would have to see the forward's output.

    Cost: the block's first backward all-reduces all gradients.
    """
    require_models("trigger_sync_in_backward", [model])
    inner: Any = inside_compiled(model)
    if not isinstance(inner, DistributedDataParallel):
        yield
        return
    if inner.find_unused_parameters and not inner.static_graph:
        raise PlanError(
            "trigger_sync_in_backward cannot tell which parameters are unused when the forward ran under no_sync: make "
            "DDP with find_unused_parameters=False, or run the last forward outside no_sync."
        )
    before = inner.require_backward_grad_sync, inner.require_forward_param_sync
    inner.require_backward_grad_sync = inner.require_forward_param_sync = True
    inner.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        inner.require_backward_grad_sync, inner.require_forward_param_sync = before


@contextmanager
def join_uneven_inputs(joinables: Sequence[Any]) -> Iterator[None]:
    """A block in which ranks that run out of data shadow the others' collectives until all are done.

    Args:
        joinables: DDP models, and optimizers that are torch `Joinable`s. Others do not communicate and are passed over.

    Cost: one small all-reduce per step tells who is still there.
    """
    if not isinstance(joinables, list | tuple):
        raise PlanError(f"join_uneven_inputs takes a list of models, and got {joinables!r}")
    taking_part = [joinable for joinable in joinables if isinstance(joinable, Joinable)]
    if not taking_part or not torch.distributed.is_initialized():
        warn_user(
            "join_uneven_inputs has no effect here: it works with models under DistributedDataParallel, and got "
            f"{[type(joinable).__name__ for joinable in joinables]}.",
        )
        yield
        return
    with Join(taking_part):
        yield
