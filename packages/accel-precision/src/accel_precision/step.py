"""The policy as a step of a parallel plan (the protocol is accel-parallel's, met by shape)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_state.errors import PrecisionError

from .handlers import AutocastKwargs
from .policy import PrecisionPolicy

M = TypeVar("M", bound=nn.Module)

ENTRY_POINTS = ("generate", "encode", "decode")
"""Methods that compute like forward does, by their usual names: where a model has them they run under autocast too."""


@dataclass(frozen=True)
class AutocastStep:
    """Last step of a plan: forward and `ENTRY_POINTS` under autocast.

    Under DDP they are the inner model's, so that the model computes alike when it is unwrapped, and outputs are
    converted before DDP looks for tensors in them.
    """

    policy: PrecisionPolicy
    handler: AutocastKwargs | None = None

    name = "autocast"
    slot = "autocast"
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset({"autocast"})

    def check(self, _model: nn.Module, context: Any, /) -> list[str]:
        """Why this device could not compute by the policy; empty where it can."""
        try:
            self.policy.require(context.device)
        except PrecisionError as error:
            return [str(error)]
        return []

    def apply(self, model: M, context: Any, /) -> M:
        """Wrap the methods that compute; the model returned is the one passed."""
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        present = [name for name in ENTRY_POINTS if callable(getattr(type(inner), name, None))]
        for name in ("forward", *present):
            self.policy.wrap(inner, context.device.type, handler=self.handler, method=name)
        return model

    def describe(self, _model: nn.Module | None, _context: Any, /) -> str:
        """One line for `Plan.explain`."""
        if self.policy.name == "no":
            return "full precision, nothing to do"
        converts = self.policy.output is not None and (self.handler is None or self.handler.convert_outputs)
        to = "bf16 around fp8" if self.policy.name == "fp8" else self.policy.name
        return f"forward under autocast to {to}, outputs {'in fp32' if converts else 'as computed'}"


def autocast_step(policy: PrecisionPolicy, handler: AutocastKwargs | None = None) -> AutocastStep:
    """The step that makes a model compute by `policy`."""
    return AutocastStep(policy, handler)
