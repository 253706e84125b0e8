"""Values for models of which only rank 0, or nobody, has them: one unit at a time, so that no other rank holds more."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_state.errors import PlanError

Init = Callable[[nn.Module], None]


def has_meta(model: nn.Module) -> bool:
    """Whether parameters or buffers lie on the meta device, without values."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def must_be_filled(model: nn.Module, from_rank_0: bool, init: Init | None, device: torch.device) -> bool:
    """Whether values have to come from rank 0. Every rank calls it and gets the same answer.

    Raises:
        PlanError: on every rank, if rank 0 has no values either and no function to make them.

    Cost: one all-reduce of two numbers.
    """
    empty = has_meta(model)
    facts = torch.tensor([empty, empty and dist.get_rank() == 0 and init is None], dtype=torch.int32, device=device)
    dist.all_reduce(facts, dist.ReduceOp.MAX)
    some_empty, nobody_has = (bool(fact) for fact in facts.tolist())
    if nobody_has:
        raise PlanError(
            "the model lies on the meta device on rank 0 too, so nobody has its values: load them on rank 0 before, or "
            "give param_init_fn, which is called with each module that holds empty parameters"
        )
    return from_rank_0 or some_empty


def fill_from_rank_0(unit: nn.Module, init: Init | None, device: torch.device) -> None:
    """Give the parameters and buffers of `unit` rank 0's values on every rank.

    Parameters that are sharded already (DTensors) are passed over. On rank 0 modules with empty parameters are given
    values by `init`, as one rank alone would.

    Args:
        device: where empty tensors are made.

    Cost: a broadcast per tensor; each rank holds the unit as a whole until it is sharded.
    """
    empty_modules = [module for module in unit.modules() if _holds_empty(module)]
    _allocate(unit, device)
    if dist.get_rank() == 0 and init is not None:
        for module in empty_modules:
            init(module)
    for tensor in _whole_tensors(unit):
        carried = tensor.detach().to(device)
        dist.broadcast(carried, src=0)
        if carried.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(carried)


def equalise(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the values that its first rank has; of DTensors, those of its part.

    Cost: one broadcast per tensor.
    """
    source = dist.get_process_group_ranks(group)[0]
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        dist.broadcast(local.detach(), source, group)


def _holds_empty(module: nn.Module) -> bool:
    return any(t.is_meta for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


def _allocate(unit: nn.Module, device: torch.device) -> None:
    """Memory for what lies on the meta device; tensors that are shared stay shared."""
    made: dict[int, Tensor] = {}
    for module in unit.modules():
        for held in (module._parameters, module._buffers):  # noqa: SLF001 - tensors are replaced, whatever their kind
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta or isinstance(tensor, DTensor):
                    continue
                if id(tensor) not in made:
                    empty = torch.empty_like(tensor, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                held[name] = made[id(tensor)]  # type: ignore[assignment]


def _whole_tensors(unit: nn.Module) -> Iterable[Tensor]:
    for tensor in (*unit.parameters(), *unit.buffers()):
        if not isinstance(tensor, DTensor):
            yield tensor
