"""Optimizers that were made before their model was sharded, pointed at the parameters that took the old ones' place."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_parallel.plan import is_pipelined
from accel_state.errors import PlanError

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def canonical_name(name: str) -> str:
    """A parameter's name without the parts that FSDP version 1, checkpointing and the compiler add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class Replacements:
    """Which parameter took the place of which. Holds the old ones weakly, so that their memory can go."""

    def __init__(self) -> None:
        self._new_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._elsewhere: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters of other ranks' stages, as keys

    def follow(self, model: nn.Module, change: Callable[[], nn.Module]) -> nn.Module:
        """Run `change`, which returns the changed model, and note what it replaced."""
        before = [(canonical_name(n), weakref.ref(p)) for n, p in model.named_parameters(remove_duplicate=False)]
        changed = change()
        after = _parameters_by_name(changed)
        for name, reference in before:
            old, new = reference(), after.get(name)
            if old is not None and new is not None and old is not new:
                self._new_of[old] = new
            if old is not None and new is None and is_pipelined(changed):
                self._elsewhere[old] = True
        return changed

    def repoint(self, optimizer: Optimizer) -> None:
        """Make the optimizer train the new parameters, with the state that it has; not those of other ranks' stages.

        Raises:
            PlanError: a parameter without values, or one that several groups share now; nothing was changed then.
        """
        groups = [self._repointed(group["params"]) for group in optimizer.param_groups]
        _require_values(groups)
        _require_one_group_each(groups)
        for old, state in [(old, optimizer.state.pop(old)) for old in list(optimizer.state) if old in self._new_of]:
            new = self._new_of[old]
            optimizer.state[new] = {key: _like(value, old, new) for key, value in state.items()}
        for gone in [old for old in optimizer.state if old in self._elsewhere]:
            del optimizer.state[gone]
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"][:] = parameters  # in place: some optimizers keep the list elsewhere too

    def _repointed(self, parameters: list[Tensor]) -> list[Tensor]:
        here = (parameter for parameter in parameters if parameter not in self._elsewhere)
        new = (self._new_of.get(parameter, parameter) for parameter in here)
        return list({id(parameter): parameter for parameter in new}.values())


def _parameters_by_name(model: nn.Module) -> Mapping[str, Tensor]:
    """Canonical name to parameter; where FSDP version 1 keeps several in a flat one, each of them to that."""
    named: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts = getattr(parameter, "_fqns", None)
        prefix = canonical_name(name).rpartition("_flat_param")[0]
        for part in (name,) if parts is None else (prefix + part for part in parts):
            named[canonical_name(part)] = parameter
    return named


def _require_values(groups: list[list[Tensor]]) -> None:
    empty = sum(parameter.is_meta for group in groups for parameter in group)
    if empty:
        raise PlanError(
            f"the optimizer holds {empty} parameters on the meta device that no prepared model has any more, as if it "
            "had been made before to_empty: make the optimizer after that, or after prepare(model)"
        )


def _require_one_group_each(groups: list[list[Tensor]]) -> None:
    ids = [id(parameter) for group in groups for parameter in group]
    if len(set(ids)) != len(ids):
        raise PlanError(
            "parameters of different groups of the optimizer lie in one flat parameter of FSDP: use "
            "FullyShardedDataParallelPlugin(use_orig_params=True), or fsdp_version=2"
        )


def _like(value: Any, old: Tensor, new: Tensor) -> Any:
    """State of the old parameter, laid out as the new one where it has an entry for each of its entries."""
    if not isinstance(value, Tensor) or value.shape != old.shape or not isinstance(new, DTensor):
        return value
    return distribute_tensor(value.to(new.device), new.device_mesh, new.placements, src_data_rank=None)
