"""The policy as a step of a parallel plan (the protocol is accel-parallel's, met by shape)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_state.errors import PrecisionError

from .capability import require_dtype
from .handlers import AutocastKwargs
from .policy import PrecisionPolicy

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class AutocastStep:
    """Last step of a plan: forward under autocast.

    Under DDP it is the inner model's forward, so that the model computes alike when it is unwrapped, and outputs are
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
            require_dtype(self.policy.compute, context.device.type)
        except PrecisionError as error:
            return [str(error)]
        return []

    def apply(self, model: M, context: Any, /) -> M:
        """Wrap the forward that computes; the model returned is the one passed."""
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self.policy.wrap(inner, context.device.type, handler=self.handler)
        return model

    def describe(self, _model: nn.Module | None, _context: Any, /) -> str:
        """One line for `Plan.explain`."""
        if self.policy.name == "no":
            return "full precision, nothing to do"
        outputs = "as computed" if self.policy.output is None else "in fp32"
        return f"forward under autocast to {self.policy.name}, outputs {outputs}"


def autocast_step(policy: PrecisionPolicy, handler: AutocastKwargs | None = None) -> AutocastStep:
    """The step that makes a model compute by `policy`."""
    return AutocastStep(policy, handler)
