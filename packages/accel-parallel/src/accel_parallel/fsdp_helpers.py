"""The peer's helpers around FSDP, for code that calls them by name; each is a call of what does the work here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim import Optimizer

from .fsdp_plugin import FullyShardedDataParallelPlugin
from .plan import Plan
from .repointing import canonical_name
from .steps.activation_checkpointing import checkpointing_of
from .steps.fsdp2 import fsdp2

_EFFICIENT_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def enable_fsdp_ram_efficient_loading() -> None:
    """Let plugins that are made from now on, and libraries that load models, take weights from rank 0 alone."""
    os.environ[_EFFICIENT_LOADING] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Undo `enable_fsdp_ram_efficient_loading`."""
    os.environ[_EFFICIENT_LOADING] = "False"


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """The same values by the names that the bare model has for them."""
    return {canonical_name(name): value for name, value in named_params.items()}


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Checkpoint the activations of the units that the Accelerator's FSDP plugin shards, in place.

    Raises:
        PlanError: the model has no such units.
    """
    return Plan([checkpointing_of(accelerator.state.fsdp_plugin)]).apply(model, accelerator.engine.context)


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model by the Accelerator's FSDP plugin over its mesh, and do nothing else to it.

    Optimizers made before follow it when they are prepared.

    Raises:
        PlanError: it cannot be sharded so; nothing was changed then.
    """
    prepared: nn.Module = accelerator.engine.prepare_model(model, Plan([fsdp2(accelerator.state.fsdp_plugin)]))
    return prepared


def fsdp2_load_full_state_dict(
    accelerator: Any,  # noqa: ARG001 - the peer's parameter
    model: nn.Module,
    full_sd: Mapping[str, Any],
    cpu_offload: bool = False,
) -> None:
    """Give a sharded model the values that rank 0 has whole. Every rank calls it.

    Args:
        model: under `fully_shard`.
        full_sd: on rank 0 the state; elsewhere it is not read.
        cpu_offload: leave the parts on the CPU.

    Cost: a broadcast of each tensor, one at a time.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload)
    set_model_state_dict(model, dict(full_sd), options=options)


def fsdp2_switch_optimizer_parameters(optimizer: Optimizer, mapping: Mapping[Any, Tensor]) -> None:
    """Make an optimizer train other parameters, in the places of its own.

    Args:
        mapping: address of the old one's values (`data_ptr()`), to the new one.

    Raises:
        KeyError: a parameter that the mapping does not have; nothing was changed then.
    """
    groups = [[_switched(parameter, mapping) for parameter in group["params"]] for group in optimizer.param_groups]
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters


def _switched(parameter: Any, mapping: Mapping[Any, Tensor]) -> Tensor:
    address = parameter.data_ptr() if callable(parameter.data_ptr) else parameter.data_ptr
    if address not in mapping:
        raise KeyError(
            f"a parameter of shape {tuple(parameter.shape)} in the optimizer has no successor in the mapping, so it "
            "would no longer be trained: make the mapping from all parameters of the model before it was sharded"
        )
    return mapping[address]


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device | str
) -> Callable[[nn.Module], Any]:
    """`param_init_fn` for a model whose modules share parameters, which making them one by one would part.

    Args:
        param_init_fn: gives values to one module's own parameters.
        model: still as it was made, with its parameters shared.
        device: where the values are made, as `param_init_fn` does.

    Returns:
        A function of a module; the first of those that share a parameter makes it, and the others take that.
    """
    owners: dict[int, list[tuple[int, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((id(module), name))
    tied = {place: key for key, places in owners.items() if len(places) > 1 for place in places}
    if not tied:
        return param_init_fn
    made: dict[int, nn.Parameter] = {}
    wanted = torch.device(device)

    def init_and_tie(module: nn.Module) -> Any:
        result = param_init_fn(module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            key = tied.get((id(module), name))
            if key is None or parameter.device.type != wanted.type:
                continue
            setattr(module, name, made.setdefault(key, parameter))
        return result

    return init_and_tie


def get_module_children_bottom_up(
    model: nn.Module, return_fqns: bool = False
) -> list[nn.Module] | list[tuple[str, nn.Module]]:
    """All modules of a model, each after those inside it, the model last.

    Args:
        return_fqns: give (name, module) pairs; the model's own name is "".
    """
    pairs = _bottom_up("", model)
    return pairs if return_fqns else [module for _, module in pairs]


def _bottom_up(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    inner = [
        pair
        for child_name, child in module.named_children()
        for pair in _bottom_up(f"{name}.{child_name}" if name else child_name, child)
    ]
    return [*inner, (name, module)]


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """The parameters of some modules of a model, which are moved to a device: those that `fully_shard` should ignore.

    Args:
        modules: the modules, or a regular expression for their names; None for none.
        model: has them.
        device: where their parameters are moved to, since sharding will not move them.

    Raises:
        SettingError: the expression fits no module.
    """
    found: set[nn.Parameter] = set()
    for module in FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules=modules).ignored_in(model):
        found.update(module.to(device).parameters())
    return found


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """The class called `name` of a module or of one within it, outermost first; None where none is called so."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)
