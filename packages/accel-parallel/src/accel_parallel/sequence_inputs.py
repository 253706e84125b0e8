"""What a model of the transformers library is called with, put right for a rank that holds a part of the sequence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accel_state.errors import PlanError

Positions = Callable[[int, torch.device], Tensor | None]
"""From the length of this rank's part to the places in the sequence; None where nothing is shared at the moment."""

_TELLING = ("position_ids", "labels", "shift_labels")


class SequenceInputs:
    """A hook before a model's forward. It gives positions where there are none, and refuses what would go wrong.

    Args:
        names: of forward's parameters, in their order.
        positions: where this rank's tokens are.
        axis: "cp" or "sp", for messages.
        whole: from a tensor of this rank's part to that of all, where it is known: ranks refuse the same then.
    """

    def __init__(self, names: tuple[str, ...], positions: Positions, axis: str, whole: Callable[[Any], Any]) -> None:
        self.names, self.positions, self.axis, self.whole = names, positions, axis, whole

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given: Mapping[str, Any] = {**dict(zip(self.names, args, strict=False)), **kwargs}
        tokens = next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)
        if tokens is None:
            return None
        positions = self.positions(tokens.shape[1], tokens.device)
        if positions is None:
            return None
        self._check(given)
        if "position_ids" not in self.names or given.get("position_ids") is not None:
            return None
        named = {name: value for name, value in given.items() if value is not None}
        return (), {**named, "position_ids": positions.unsqueeze(0)}

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceInputs:
        return self  # process groups, which `positions` may hold, are not copied

    def _check(self, given: Mapping[str, Any]) -> None:
        if given.get("labels") is not None and given.get("shift_labels") is None:
            raise PlanError(
                f"under {self.axis} labels were given, which the model would shift within this rank's part of the "
                "sequence: shift them before it is cut, labels = accel_parallel.shift_labels(labels), and pass "
                "model(..., labels=labels, shift_labels=labels)"
            )
        if given.get("attention_mask") is not None:
            refuse_padding(self.whole(given["attention_mask"]), self.axis)


def refuse_padding(mask: Any, axis: str) -> None:
    """Raise for a mask that says anything, on the CPU at once; on an accelerator the kernel fails, without a wait."""
    reason = (
        f"under {axis} an attention_mask was given that is not plainly causal: only causal and full attention can be "
        "shared. Right padding needs no mask under causal attention: leave it out and give its labels -100"
    )
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point():
        raise PlanError(reason)
    if mask.device.type == "cpu":
        if not mask.all():
            raise PlanError(reason)
    else:
        torch._assert_async(mask.all(), reason)  # noqa: SLF001 - the only check without waiting for the device


def watch_inputs(
    model: nn.Module, positions: Positions, axis: str, whole: Callable[[Any], Any] = lambda part: part
) -> None:
    """Put the hook on the outermost module that takes positions or labels; a model without such a one stays alone."""
    for module in model.modules():
        if any(isinstance(hook, SequenceInputs) for hook in module._forward_pre_hooks.values()):  # noqa: SLF001
            return
        names = tuple(inspect.signature(module.forward).parameters)
        if any(name in names for name in _TELLING):
            module.register_forward_pre_hook(SequenceInputs(names, positions, axis, whole), with_kwargs=True)
            return
