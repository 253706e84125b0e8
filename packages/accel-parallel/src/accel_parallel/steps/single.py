"""Put the model on this rank's device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from accel_parallel.dispatch.device_maps import has_several_devices
from accel_parallel.plan import PlanContext
from accel_parallel.sizes import format_bytes, parameter_bytes


@dataclass(frozen=True)
class Single:
    """Moves parameters and buffers to the rank's device, in place. See `single`."""

    move: bool = True

    name = "single"
    slot = "placement"
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset({"placed"})

    def check(self, model: nn.Module, context: PlanContext, /) -> list[str]:
        """Models on the meta device have nothing to move; of models spread over devices there can be one copy only."""
        if has_several_devices(model):
            return [] if context.world_size == 1 else [_spread(model, context.world_size)]
        complaints = []
        empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if empty:
            complaints.append(
                f"{len(empty)} parameters are on the meta device and hold no values ({empty[0]} is the first): call "
                f"model.to_empty(device={str(context.device)!r}) and load or initialise them before."
            )
        return complaints

    def apply(self, model: nn.Module, context: PlanContext, /) -> nn.Module:
        """The same model, on `context.device` if it is to be moved; one that was dispatched stays where it is."""
        if has_several_devices(model):
            return model
        tensors = (*model.parameters(), *model.buffers())
        if not self.move or all(tensor.device == context.device for tensor in tensors):
            return model  # parameters that are shared already must not be replaced
        return model.to(context.device)

    def describe(self, model: nn.Module | None, context: PlanContext, /) -> str:
        """Where to, and how much."""
        if not self.move:
            return "parameters and buffers stay where they are"
        size = "" if model is None else f" ({format_bytes(parameter_bytes(model))})"
        return f"parameters and buffers{size} on {context.device}"


def _spread(model: nn.Module, world_size: int) -> str:
    maps: list[Any] = [getattr(module, "hf_device_map", {}) for module in model.modules()]
    places = sorted({str(place) for device_map in maps for place in device_map.values()})
    return (
        f"its device map puts parts of the model on {', '.join(places)}, and {world_size} ranks train one copy each on "
        "one device of their own: load it without a device map, or start one process"
    )


def single(move: bool = True) -> Single:
    """The step that places the model on its device; all that one rank needs.

    Args:
        move: False leaves the model where its owner put it.
    """
    return Single(move)
