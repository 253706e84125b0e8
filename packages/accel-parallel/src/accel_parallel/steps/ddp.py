"""Replicate the model on every rank and average gradients (torch's DistributedDataParallel)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from accel_parallel.ddp_kwargs import DistributedDataParallelKwargs
from accel_parallel.entry_points import explain_hidden
from accel_parallel.plan import PlanContext
from accel_parallel.sizes import format_bytes, parameter_bytes


class DistributedDataParallel(TorchDistributedDataParallel):
    """torch's, by the same name, which says how to reach what the model inside has and it has not."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """torch's, whose complaint about parameters without gradient gets their names and the way out."""
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            if "finished reduction in the prior iteration" not in str(error):
                raise
            raise RuntimeError(_about_unused(self, str(error))) from None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = vars(self).get("_modules", {}).get("module")
            if inner is None:
                raise
            raise AttributeError(explain_hidden(type(self).__name__, inner, name)) from None


def _about_unused(model: TorchDistributedDataParallel, complaint: str) -> str:
    """Which parameters had no part in the last backward; torch numbers those that it trains, in order."""
    trained = [
        name
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore
    ]
    numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", complaint)
    unused = [trained[int(n)] for n in numbers.group(1).split() if int(n) < len(trained)] if numbers else []
    which = f"{', '.join(unused)} had" if unused else "some parameters had"
    return (
        f"{which} no part in the loss of the last backward, and DistributedDataParallel still waits for their "
        "gradients. Pass DistributedDataParallelKwargs(find_unused_parameters=True) (in Accelerator: as one of "
        "kwargs_handlers), freeze them by requires_grad_(False), or let every output of forward take part in the loss. "
        f"torch says: {complaint}"
    )


@dataclass(frozen=True)
class Ddp:
    """Wraps the model in DistributedDataParallel. See `ddp`."""

    handler: DistributedDataParallelKwargs | None = None

    name = "ddp"
    slot = "data_parallel"
    needs: frozenset[str] = frozenset({"placed"})
    gives: frozenset[str] = frozenset({"replicated"})

    def check(self, model: nn.Module, context: PlanContext, /) -> list[str]:
        """A process group has to be there, and all of the model's parameters have to be ordinary ones."""
        complaints = []
        if not dist.is_initialized():
            complaints.append(
                "there is no process group: start the script by a launcher and create PartialState() first, or call "
                "torch.distributed.init_process_group."
            )
        elif context.process_group is None and dist.get_world_size() != context.world_size:
            complaints.append(
                f"the context says {context.world_size} ranks, the process group has {dist.get_world_size()}: "
                "pass the process group that belongs to this plan."
            )
        uninitialised = [name for name, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter)]
        if uninitialised:
            complaints.append(f"lazy parameters have no shape yet ({uninitialised}): run one forward pass before.")
        return complaints

    def apply(self, model: nn.Module, context: PlanContext, /) -> nn.Module:
        """The wrapped model; one without trained parameters, or wrapped already, is returned itself."""
        if isinstance(model, TorchDistributedDataParallel) or not any(p.requires_grad for p in model.parameters()):
            return model
        on_accelerator = context.device.type != "cpu"
        options: dict[str, Any] = {} if self.handler is None else self.handler.to_kwargs()
        wrapped = DistributedDataParallel(
            model,
            device_ids=[context.device.index] if on_accelerator and context.device.index is not None else None,
            process_group=context.process_group,
            **options,
        )
        if self.handler is not None:
            self.handler.register_comm_hook(wrapped)
        return wrapped

    def describe(self, model: nn.Module | None, context: PlanContext, /) -> str:
        """What is sent per update: a ring all-reduce sends 2 (n-1)/n of the gradients' bytes per rank."""
        if model is None:
            return "gradients averaged over all ranks during backward"
        size = parameter_bytes(model, trained_only=True)
        sent = 2 * size * (context.world_size - 1) / context.world_size
        return (
            f"gradients ({format_bytes(size)}) averaged over {context.world_size} ranks during backward, "
            f"{format_bytes(sent)} sent per rank and update"
        )


def ddp(handler: DistributedDataParallelKwargs | None = None) -> Ddp:
    """The step that trains replicas in step with each other.

    Args:
        handler: options of DistributedDataParallel; torch's own defaults without.

    Cost: parameters and buffers are broadcast from rank 0 once; each synchronising backward all-reduces gradients.
    """
    return Ddp(handler)
