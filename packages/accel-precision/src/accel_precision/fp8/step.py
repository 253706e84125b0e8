"""The conversion to 8-bit layers as a step of a parallel plan (the protocol is accel-parallel's, met by shape)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from .backend import Fp8Backend


@dataclass(frozen=True)
class Fp8Step:
    """Replaces layers by ones that compute in 8 bits. See `fp8_step`."""

    backend: Fp8Backend
    sharded: bool = False

    name = "fp8"
    slot = "fp8"
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset({"fp8"})

    def check(self, _model: nn.Module, context: Any, /) -> list[str]:
        """Why this device could not compute so; empty where it can."""
        obstacle = self.backend.obstacle(context.device)
        return [] if obstacle is None else [obstacle]

    def apply(self, model: nn.Module, _context: Any, /) -> nn.Module:
        """The model, its layers replaced in place; those that are converted already stay."""
        return self.backend.convert(model, sharded=self.sharded)

    def describe(self, _model: nn.Module | None, _context: Any, /) -> str:
        """One line for `Plan.explain`."""
        return self.backend.describe()


def fp8_step(backend: Fp8Backend, *, sharded: bool = False) -> Fp8Step:
    """The step that converts a model to 8-bit layers; autocast's step comes at the end as ever.

    Args:
        backend: as of `fp8_backend`.
        sharded: whether a later step shards parameters, which can then be gathered in 8 bits.
    """
    return Fp8Step(backend, sharded)
