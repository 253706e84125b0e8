"""Which modules of a model are sharded by themselves, so that their parameters are gathered and freed together."""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accel_state.errors import PlanError

WrapPolicy = Callable[..., bool]
"""Called with (module, recurse, nonwrapped_numel), as torch's: whether to look inside, or to shard it by itself."""

Wrap = str | int | Collection[str] | Callable[..., Any] | None
"""How users say which modules: "blocks", names, a size, a function, or None for the model as one."""


def policy_of(model: nn.Module, wrap: Wrap) -> WrapPolicy | None:
    """The policy that `wrap` means for one model; None takes the model as one unit.

    Raises:
        PlanError: it fits no module, or is no function of the forms that are allowed.
    """
    if wrap is None:
        return None
    if wrap == "blocks":
        return by_blocks(model)
    if isinstance(wrap, int):
        return by_size(wrap)
    if callable(wrap):
        return as_policy(wrap)
    return by_names(model, [wrap] if isinstance(wrap, str) else wrap)


def chosen(model: nn.Module, wrap: Wrap) -> list[nn.Module]:
    """The modules that `wrap` means, in the model's order, none inside another; the model itself for None."""
    policy = policy_of(model, wrap)
    if policy is None:
        return [model]
    found = {id(module) for module in units(model, policy)}
    return _outermost(model, found)


def _outermost(module: nn.Module, found: set[int]) -> list[nn.Module]:
    outer: list[nn.Module] = []
    for child in module.children():
        outer += [child] if id(child) in found else _outermost(child, found)
    return outer


def by_class_names(model: nn.Module, names: Iterable[str]) -> WrapPolicy:
    """A policy that takes the modules of these classes.

    Raises:
        PlanError: the model has no module of one of them; lists what it has.
    """
    classes = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in names if name not in classes]
    if missing:
        raise PlanError(
            f"the model has no module of class {', '.join(missing)}: its classes are {', '.join(sorted(classes))}"
        )
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={classes[name] for name in names})


def by_blocks(model: nn.Module) -> WrapPolicy:
    """A policy that takes the model's repeated blocks, see `repeated_blocks`.

    Raises:
        PlanError: there are none.
    """
    blocks = {id(block) for block in repeated_blocks(model)}
    if not blocks:
        raise PlanError(
            f"{type(model).__name__} has no repeated blocks: name the modules to shard by class, by name or by size"
        )
    return by_predicate(lambda module: id(module) in blocks)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers that the model is made of: instances of the classes that transformers lists in `_no_split_modules`,
    else the modules of one class that fill a ModuleList. Blocks inside blocks are not among them.
    """
    listed = set(getattr(model, "_no_split_modules", None) or ())
    found: list[nn.Module] = []
    _find_blocks(model, listed & {type(module).__name__ for module in model.modules()}, found)
    return found


def _find_blocks(module: nn.Module, listed: set[str], found: list[nn.Module]) -> None:
    counts = Counter(type(child) for child in module.children()) if isinstance(module, nn.ModuleList) else Counter()
    for child in module.children():
        is_block = type(child).__name__ in listed if listed else counts[type(child)] > 1
        if is_block and next(child.parameters(), None) is not None:
            found.append(child)
        else:
            _find_blocks(child, listed, found)


def by_size(min_num_params: int) -> WrapPolicy:
    """A policy that takes modules with at least so many parameters that no inner module has taken."""
    return functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params)


def by_names(model: nn.Module, patterns: Collection[str]) -> WrapPolicy:
    """A policy that takes modules by name, with shell wildcards: "layers.*", "*.mlp".

    Raises:
        PlanError: a pattern that fits nothing.
    """
    taken: set[int] = set()
    for pattern in patterns:
        fitting = [id(module) for name, module in model.named_modules() if fnmatch.fnmatchcase(name, pattern)]
        if not fitting:
            raise PlanError(f"no module of the model is named like {pattern!r}: see model.named_modules()")
        taken.update(fitting)
    return by_predicate(lambda module: id(module) in taken)


def by_predicate(is_unit: Callable[[nn.Module], bool]) -> WrapPolicy:
    """A policy that takes the modules for which `is_unit(module)` holds."""

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:  # noqa: ARG001 - torch's names
        return True if recurse else is_unit(module)

    return policy


def as_policy(function: Any) -> WrapPolicy:
    """A user's function as a policy: of torch's form, or of the module alone.

    Raises:
        PlanError: not a function of either form.
    """
    if callable(function):
        parameters = inspect.signature(function).parameters
        if "recurse" in parameters:
            return function  # type: ignore[no-any-return]  # of torch's form
        required = [p for p in parameters.values() if p.default is p.empty]
        if len(required) == 1:
            return by_predicate(function)
    raise PlanError(
        f"auto_wrap_policy={function!r} is no policy: give a name, a function of a module, or one with the parameters "
        "module, recurse and nonwrapped_numel as torch's policies have"
    )


def units(model: nn.Module, policy: WrapPolicy | None, ignored: Collection[nn.Module] = ()) -> list[nn.Module]:
    """The modules that `policy` takes inside `model`, inner ones first; the model itself is not among them."""
    found: list[nn.Module] = []
    if policy is not None:
        left_out = {id(inner) for module in ignored for inner in module.modules()}
        _visit(model, policy, left_out, found)
    return [module for module in found if module is not model]


def _visit(module: nn.Module, policy: WrapPolicy, left_out: set[int], found: list[nn.Module]) -> int:
    """Returns how many parameters inner units have taken, torch's own way of walking.

    Args:
        left_out: ids of the modules that are not visited; those that are taken join them.
    """
    numel = sum(p.numel() for p in module.parameters())
    taken = 0
    if policy(module=module, recurse=True, nonwrapped_numel=numel):
        for child in module.children():
            if id(child) not in left_out:
                taken += _visit(child, policy, left_out, found)
        if policy(module=module, recurse=False, nonwrapped_numel=numel - taken):
            found.append(module)
            left_out.add(id(module))
            return numel
    return taken


def parameters_in_two_units(model: nn.Module, inner: Sequence[nn.Module]) -> list[str]:
    """Names of parameters that are shared between modules of different units, which cannot be sharded."""
    owner: dict[int, int] = {}
    unit_of = {id(module): index for index, unit in reversed(list(enumerate(inner))) for module in unit.modules()}
    shared = []
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            unit = unit_of.get(id(module), -1)
            if owner.setdefault(id(parameter), unit) != unit:
                shared.append(f"{prefix}.{name}" if prefix else name)
    return shared


def own_parameters(unit: nn.Module, inner: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of a unit that no unit inside it holds."""
    others = {id(other) for other in inner if other is not unit}
    return [p for module in _own_modules(unit, others) for p in module.parameters(recurse=False)]


def _own_modules(module: nn.Module, others: Collection[int]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if id(child) not in others:
            yield from _own_modules(child, others)
