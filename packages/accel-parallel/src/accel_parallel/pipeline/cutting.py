"""Cutting a model into stages that keep the model's own names of parameters."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from accel_state.errors import PlanError

from .config import PipelineConfig

_WAYS = (
    "make it an nn.Sequential, name the modules that its input passes one after the other in "
    "PipelineConfig(layers=[...]), let torch trace it by `example` and `cuts`, or give make_stage"
)


class Chain(nn.Module):
    """Modules that the input passes one after the other, under the names that they had in the model.

    Args:
        layers: name to module, in order.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._order = [name for name, _ in layers]
        self._no_split_modules = sorted({type(module).__name__ for _, module in layers})  # units for sharding
        for name, module in layers:
            _graft(self, name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The last module's output."""
        first, *others = self._order
        value = self.get_submodule(first)(*args, **kwargs)
        for name in others:
            value = self.get_submodule(name)(value)
        return value


def _graft(root: nn.Module, name: str, module: nn.Module) -> None:
    """Place a module at a dotted name, making what lies between."""
    owner, last = _owner(root, name)
    owner.add_module(last, module)


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that something of a dotted name belongs to, and its name there; what lies between is made."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:  # noqa: SLF001 - asked without get_submodule's exception
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root, last


def chain_of(model: nn.Module, config: PipelineConfig) -> list[tuple[str, nn.Module]]:
    """The layers that the input passes, by name.

    Raises:
        PlanError: the model is no chain that is known, a pattern fits nothing, or modules outside it have parameters.
    """
    if config.layers is None:
        if not isinstance(model, nn.Sequential):
            raise PlanError(f"nothing says how to cut a {type(model).__name__} into stages: {_WAYS}.")
        return list(model.named_children())
    layers: list[tuple[str, nn.Module]] = []
    for pattern in config.layers:
        fitting = [(n, m) for n, m in model.named_modules() if n and _fits(n, pattern)]
        if not fitting:
            raise PlanError(f"no module of the model is named like {pattern!r}: see model.named_modules().")
        layers += fitting
    inside = {id(p) for _, module in layers for p in module.parameters()}
    outside = [name for name, p in model.named_parameters() if id(p) not in inside]
    if outside:
        raise PlanError(f"{', '.join(outside[:5])} belong to no module in `layers`, so no stage would have them.")
    return layers


def _fits(name: str, pattern: str) -> bool:
    """Wildcards stand for one part of a dotted name, so that "blocks.*" means the blocks and nothing inside them."""
    return name.count(".") == pattern.count(".") and fnmatch.fnmatchcase(name, pattern)


def balanced_runs(sizes: Sequence[int], count: int) -> list[range]:
    """Indices cut into `count` runs whose largest sum is as small as can be; none is empty.

    Binary search for that sum (the linear partition problem), then runs filled up to it from the front.
    """
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if _runs_needed(sizes, middle) <= count:
            high = middle
        else:
            low = middle + 1
    runs: list[range] = []
    first, total = 0, 0
    for index, size in enumerate(sizes):
        left = count - len(runs) - 1  # runs that come after the one being filled
        if index > first and left and (total + size > low or len(sizes) - index <= left):
            runs.append(range(first, index))
            first, total = index, 0
        total += size
    return [*runs, range(first, len(sizes))]


def _runs_needed(sizes: Sequence[int], limit: int) -> int:
    runs, total = 1, 0
    for size in sizes:
        if total + size > limit:
            runs, total = runs + 1, 0
        total += size
    return runs


def cut_chain(model: nn.Module, config: PipelineConfig, num_stages: int, wanted: Collection[int]) -> list[nn.Module]:
    """The wanted stages of a chain, balanced by their numbers of parameters.

    Raises:
        PlanError: fewer layers than stages, a parameter that layers of two stages share, or one that the schedule
            cannot train.
    """
    layers = chain_of(model, config)
    if len(layers) < num_stages:
        raise PlanError(
            f"the model is a chain of {len(layers)} layers, fewer than the {num_stages} stages: use fewer stages, or "
            "name smaller modules in `layers`."
        )
    sizes = [max(1, sum(p.numel() for p in module.parameters())) for _, module in layers]
    runs = balanced_runs(sizes, num_stages)
    stages = [Chain([layers[index] for index in run]) for run in runs]
    require_own_parameters(stages)
    require_what_schedule_needs(stages, config)
    return [stages[index] for index in wanted]


def require_own_parameters(stages: Sequence[nn.Module]) -> None:
    """Every parameter has to belong to one stage.

    Raises:
        PlanError: names those that are shared.
    """
    owners: dict[int, dict[int, str]] = defaultdict(dict)
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            owners[id(parameter)].setdefault(index, name)
    shared = [
        " and ".join(f"{name} (stage {i})" for i, name in held.items()) for held in owners.values() if len(held) > 1
    ]
    if shared:
        raise PlanError(
            f"{'; '.join(shared)}: a parameter that is shared across stages would get a part of its gradient on each. "
            "Untie it, or cut so that one stage holds all its users."
        )


def require_what_schedule_needs(stages: Sequence[nn.Module], config: PipelineConfig) -> None:
    """The zero-bubble schedules compute gradients of inputs and of parameters apart, and torch's way to do that frees a
    parameter's graph at its first use.

    Raises:
        PlanError: such a schedule, and a parameter that has two uses in a stage.
    """
    if "zero_bubble" not in config.schedule:
        return
    for stage in stages:
        first: dict[int, str] = {}
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            if (other := first.setdefault(id(parameter), name)) != name:
                raise PlanError(
                    f"{other} and {name} are one parameter, of which torch's {config.schedule!r} cannot compute the "
                    "gradient: use schedule='interleaved_1f1b', or untie them."
                )


def require_known_names(stages: Sequence[nn.Module], names: Collection[str]) -> None:
    """Parameters of stages have the names that they have in the whole model, or checkpoints would not fit it.

    Raises:
        PlanError: names those that have others.
    """
    known = set(names)
    if other := [name for stage in stages for name, _ in stage.named_parameters() if name not in known]:
        raise PlanError(
            f"stages have parameters that the model does not: {', '.join(other[:5])}. Let make_stage keep the model's "
            "own names."
        )


def trace(model: nn.Module, config: PipelineConfig, num_stages: int) -> Any:
    """The model as torch's traced pipeline.

    Raises:
        PlanError: the cuts do not make as many stages, name no module, or the model cannot be exported, or has state
            that is no tensor.
    """
    assert config.example is not None
    cuts = list(config.cuts or ())
    if len(cuts) != num_stages - 1:
        raise PlanError(f"{len(cuts)} cuts make {len(cuts) + 1} stages, and there have to be {num_stages}.")
    names = {name for name, _ in model.named_modules()}
    unknown = [name for name in cuts if name not in names]
    if unknown:
        raise PlanError(f"`cuts` name no module of the model: {', '.join(unknown)}. See model.named_modules().")
    example: tuple[Tensor, ...] = tuple(config.example)
    try:
        pipe = pipeline(model, mb_args=example, split_spec=dict.fromkeys(cuts, SplitPoint.BEGINNING))
    except Exception as error:  # what torch.export raises has no common class
        raise PlanError(f"torch cannot trace {type(model).__name__}: {error}. Otherwise {_WAYS}.") from error
    _keep_unused(model, [pipe.get_stage_module(index) for index in range(num_stages)])
    return pipe


def _keep_unused(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Let the first stage hold what no stage has, since forward does not use it: it belongs to the model's state."""
    there = {name for stage in stages for name in stage.state_dict()}
    for name, value in model.state_dict(keep_vars=True).items():
        if name in there:
            continue
        if not isinstance(value, Tensor):
            raise PlanError(f"{name} is no tensor, and tracing keeps tensors alone: {_WAYS}.")
        owner, last = _owner(stages[0], name)
        if isinstance(value, nn.Parameter):
            owner.register_parameter(last, value)
        else:
            owner.register_buffer(last, value)
