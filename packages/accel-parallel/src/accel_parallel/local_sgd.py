"""Replicas that train on their own for some updates and then take their mean (Stich, "Local SGD Converges Fast and
Communicates Little", ICLR 2019).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from accel_state.errors import PlanError, SettingError

from .state_dicts import model_has_dtensor
from .sync import no_sync
from .unwrap import inside_compiled


class LocalSGD:
    """A block in which ranks do not reduce gradients, and take the mean of their weights every few updates.

    The optimizer's state stays each rank's own, as in the paper.

    Args:
        accelerator: whose ranks take part; None means all of torch's default process group, or this process alone.
        model: one replica, bare or under DistributedDataParallel; the same values on every rank.
        local_sgd_steps: updates between two means.
        enabled: False makes the block do nothing.

    Raises:
        SettingError: `local_sgd_steps` is not a whole number from 1.
        PlanError: the model is shared over ranks, so that none of them has one to train alone.
    """

    def __init__(self, accelerator: Any, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if isinstance(local_sgd_steps, bool) or not isinstance(local_sgd_steps, int) or local_sgd_steps < 1:
            raise SettingError(f"local_sgd_steps={local_sgd_steps!r}: give the updates between two means, from 1")
        if enabled:
            _require_replica(model)
        self.accelerator, self.model, self.local_sgd_steps = accelerator, model, local_sgd_steps
        self.enabled = enabled and _number_of_ranks(accelerator) > 1
        self.num_steps = 0
        self._group = getattr(getattr(getattr(accelerator, "engine", None), "context", None), "process_group", None)
        self._pause: AbstractContextManager[Any] | None = None

    def __enter__(self) -> Self:
        if self.enabled:
            self._pause = no_sync(self.model)
            self._pause.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pause is None:
            return
        self._pause.__exit__(kind, error, traceback)
        self._pause = None
        if kind is None:  # a rank that failed must not wait for the others here
            self._average()

    def step(self) -> None:
        """Count an update; call it after `optimizer.step()`. A micro-batch inside an accumulation window is none.

        Cost: every `local_sgd_steps` calls an all-reduce of the model, one message per dtype.
        """
        state = getattr(self.accelerator, "gradient_state", None)
        if not self.enabled or (state is not None and not state.sync_gradients):
            return
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        tensors = [t for t in (*self.model.parameters(), *self.model.buffers()) if t.is_floating_point()]
        ranks = dist.get_world_size(self._group)
        for kind in dict.fromkeys((t.dtype, t.device) for t in tensors):
            same: list[Tensor] = [t.detach() for t in tensors if (t.dtype, t.device) == kind]
            joined = torch.cat([t.reshape(-1) for t in same])
            dist.all_reduce(joined, group=self._group)
            joined /= ranks
            for tensor, mean in zip(same, joined.split([t.numel() for t in same]), strict=True):
                tensor.copy_(mean.view_as(tensor))


def _number_of_ranks(accelerator: Any) -> int:
    if accelerator is not None:
        return int(accelerator.num_processes)
    return dist.get_world_size() if dist.is_initialized() else 1


def _require_replica(model: nn.Module) -> None:
    inner = inside_compiled(model)
    if isinstance(inner, FSDPModule | FullyShardedDataParallel) or model_has_dtensor(inner):
        raise PlanError(
            f"LocalSGD of a {type(inner).__name__} whose parameters are shared over ranks: no rank has a model to "
            "train alone. Use DistributedDataParallel, or leave LocalSGD out (enabled=False)"
        )
