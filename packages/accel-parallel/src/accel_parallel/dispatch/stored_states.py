"""State dicts of models whose weights are offloaded."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from torch import Tensor, nn

from .align import Device
from .module_tensors import get_non_persistent_buffers, named_module_tensors
from .numbers import any_to_device
from .placeholders import OffloadedWeight


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Tensor]:
    """A model's state dict with all its numbers: offloaded ones are read to the CPU, mapped files stay mapped.

    Cost: memory for what is not on the CPU and not mapped.
    """
    return {
        name: tensor.load_now(any_to_device("cpu")) if isinstance(tensor, OffloadedWeight) else tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: MutableMapping[str, Tensor | str],
    device_to_put_offload: Device = "cpu",
) -> MutableMapping[str, Tensor | str]:
    """Put the numbers of a module's own tensors into a state dict.

    Args:
        module: one module of a model.
        module_name: a name that the state dict has in it: its part before the last dot is the module's.
        state_dict: changed in place.
        device_to_put_offload: where the numbers go.
    """
    root = module_name.rpartition(".")[0]
    left_out = get_non_persistent_buffers(module)
    device = any_to_device(device_to_put_offload)
    for name, tensor in named_module_tensors(module):
        full = f"{root}.{name}" if root else name
        if full in state_dict and name not in left_out:
            state_dict[full] = tensor.load_now(device) if isinstance(tensor, OffloadedWeight) else tensor.to(device)
    return state_dict


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, nn.Module]],
) -> tuple[int, list[str], list[nn.Module]]:
    """Bytes of a module together with those that share tensors with it.

    Args:
        tied_params: names, in other modules, of tensors that the module shares.
        module_size: bytes of the module.
        module_sizes: of `compute_module_sizes`.
        modules_to_treat: name and module, among which the others are looked for.

    Returns:
        Bytes, names of the others, and they themselves.
    """
    names: list[str] = []
    modules: list[nn.Module] = []
    for tied in tied_params:
        for name, module in modules_to_treat:
            if name not in names and (tied == name or tied.startswith(f"{name}.")):
                names.append(name)
                modules.append(module)
                module_size += module_sizes.get(name, 0) - module_sizes.get(tied, 0)
                break
    return module_size, names, modules
