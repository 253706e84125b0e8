"""Models under FSDP version 1 and their optimizers as checkpoints see them: by the model's own names.

FSDP keeps several parameters in a flat one, of which a rank has an interval that fits none of their shapes. Here each
parameter, and what an optimizer keeps for it, is a DTensor that is sharded along its first dim, as under `fully_shard`.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.optim import Optimizer

from accel_state.errors import PlanError

from .repointing import canonical_name
from .unwrap import class_before_sharding


class FlatModel(nn.Module):
    """Stands for a model under FSDP version 1 in a checkpoint. All ranks make it.

    Args:
        model: whose state it holds from now on. What is loaded goes into it by `write_back`.

    Cost: an all-gather of each unit, one after the other, and a copy of this rank's parts.
    """

    def __init__(self, model: FullyShardedDataParallel) -> None:
        super().__init__()
        self.flat = [model]  # in a list: it is no part of this module
        self.model_class = class_before_sharding(model.module)
        with _by_parameter(model):
            self._state: dict[str, Any] = model.state_dict()
        self._state.update({name: self._state[first] for name, first in _ties_of(model).items()})
        versions = self._state._metadata  # type: ignore[attr-defined] # noqa: SLF001 - where modules keep theirs
        versions = {canonical_name(f"{name}.").rstrip("."): version for name, version in versions.items()}
        self._state._metadata = versions  # type: ignore[attr-defined] # noqa: SLF001
        self._is_loaded = False

    @property
    def stands_for(self) -> nn.Module:
        """The user's own model."""
        return self.flat[0].module

    def state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state, sharded tensors as DTensors, tied ones as one."""
        return self._state

    def load_state_dict(self, state_dict: Mapping[str, Any], *_args: Any, **_kwargs: Any) -> None:
        """Take a state, or a part of it, for `write_back`."""
        self._state.update((name, value) for name, value in state_dict.items() if name in self._state)
        self._is_loaded = True

    def named_parameters(self, *_args: Any, **_kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The tensors of the state that are trained or frozen weights; a tied one by its first name."""
        buffers = {name for name, _ in self.named_buffers()}
        seen: set[int] = set()
        for name, value in self._state.items():
            if isinstance(value, Tensor) and name not in buffers and id(value) not in seen:
                seen.add(id(value))
                yield name, value  # type: ignore[misc] # what stands for the parameter

    def named_buffers(self, *_args: Any, **_kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The model's own."""
        for name, buffer in self.flat[0].named_buffers():
            yield canonical_name(name), buffer

    def write_back(self) -> None:
        """Write what was loaded into the model. All ranks call it. Cost: as of making it."""
        if self._is_loaded:
            with _by_parameter(self.flat[0]):
                self.flat[0].load_state_dict(OrderedDict(self._state))


class FlatOptimizer:
    """Stands for an optimizer of such a model in a checkpoint. All ranks make it.

    Args:
        optimizer: the inner one.
        model: that of all its parameters.

    Cost: an all-gather of the state of each unit, one after the other, and a copy of this rank's parts.
    """

    def __init__(self, optimizer: Optimizer, model: FlatModel) -> None:
        self.optimizer, self._model = optimizer, model
        with _by_parameter(model.flat[0]):
            self._state: dict[str, Any] = FullyShardedDataParallel.optim_state_dict(model.flat[0], optimizer)
        tensors = dict(model.named_parameters())
        self.param_groups = [
            {**group, "params": [tensors[name] for name in group["params"]]} for group in self._state["param_groups"]
        ]
        self._numbers = {
            name: i for i, name in enumerate(name for group in self._state["param_groups"] for name in group["params"])
        }
        self._is_loaded = False

    def state_dict(self) -> dict[str, Any]:
        """In torch's layout, by number."""
        return {
            "state": {self._numbers[name]: fields for name, fields in self._state["state"].items()},
            "param_groups": [
                {**group, "params": [self._numbers[name] for name in group["params"]]}
                for group in self._state["param_groups"]
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Take a state for `write_back`."""
        names = list(self._numbers)
        self._state = {
            "state": {names[number]: fields for number, fields in state["state"].items()},
            "param_groups": [
                {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
            ],
        }
        self._is_loaded = True

    def write_back(self) -> None:
        """Give the optimizer what was loaded. All ranks call it. Cost: as of making it."""
        if self._is_loaded:
            model = self._model.flat[0]
            with _by_parameter(model):
                flat = FullyShardedDataParallel.optim_state_dict_to_load(model, self.optimizer, self._state)
            self.optimizer.load_state_dict(flat)


def for_checkpoint(bare: Sequence[Any], wrapped: Sequence[Any], optimizers: Sequence[Any]) -> list[Any]:
    """Models and optimizers themselves, and what stands for those under FSDP version 1.

    Args:
        bare, wrapped: the models without and with FSDP.

    Raises:
        PlanError: an optimizer trains other parameters beside those of a model under FSDP version 1.
    """
    models = [
        FlatModel(outer) if isinstance(outer, FullyShardedDataParallel) else inner
        for inner, outer in zip(bare, wrapped, strict=True)
    ]
    flat = [model for model in models if isinstance(model, FlatModel)]
    return [*models, *(_standing_for(optimizer, flat) for optimizer in optimizers)]


def _standing_for(optimizer: Any, models: Sequence[FlatModel]) -> Any:
    own = {id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}
    for model in models:
        known = {id(parameter) for parameter in model.flat[0].parameters()}
        if own - known and own & known:
            raise PlanError(
                f"a {type(optimizer).__name__} that trains a model under FSDP version 1 and {len(own - known)} other "
                "parameters cannot be saved: give each model an optimizer of its own, or use fsdp_version=2"
            )
        if own & known:
            return FlatOptimizer(optimizer, model)
    return optimizer


def write_back(objects: Iterable[Any]) -> None:
    """Bring what a checkpoint gave to those that stand for others to these. All ranks call it, if all loaded well."""
    for item in objects:
        if isinstance(item, FlatModel | FlatOptimizer):
            item.write_back()


@contextmanager
def _by_parameter(model: FullyShardedDataParallel) -> Iterator[None]:
    """A block in which FSDP gives and takes parameters one by one.

    torch advises a successor, which makes a step of an optimizer without state to learn what it would look like.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"FSDP\.state_dict_type|`_get_pg_default|Multiple backends|When using ``NO_S")
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        ):
            yield


def _ties_of(model: FullyShardedDataParallel) -> dict[str, str]:
    """Further names of tied parameters, each with the first one."""
    ties = {}
    for prefix, unit in model.named_modules():
        handle = getattr(unit, "_handle", None) if isinstance(unit, FullyShardedDataParallel) else None
        for tie in () if handle is None else handle.flat_param._shared_param_infos:  # noqa: SLF001 - kept nowhere else
            name = _joined(prefix, tie.module_name, tie.param_name)
            ties[name] = _joined(prefix, tie.prim_module_name, tie.prim_param_name)
    return ties


def _joined(*parts: str) -> str:
    return canonical_name(".".join(part for part in parts if part))
