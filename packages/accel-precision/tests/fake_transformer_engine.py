"""A transformer-engine that refuses any call that the real one's signatures would refuse, as far as they were found.

Recipes are those of the user guides of 1.3 ("old", with `interval`) and 2.15 ("new"). Layers have the arguments that
both generations share, and `autocast` those that descriptions of recent releases give: no copy of the library was at
hand. It computes in fp32 and notes in which mode.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

ACTIVE: list[Any] = []
"""The recipes of the blocks that are open; None for one that is switched off."""


class Format(enum.Enum):
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


@dataclass
class OldDelayedScaling:
    margin: int = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None

    def __post_init__(self) -> None:
        assert self.fp8_format != Format.E5M2, "Pure E5M2 training is not supported."


@dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID


@dataclass
class Float8BlockScaling:
    fp8_format: Format = Format.E4M3


@dataclass
class MXFP8BlockScaling:
    fp8_format: Format = Format.E4M3


class Linear(nn.Module):
    seen: list[Any]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Any = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.zeros(out_features, in_features, dtype=params_dtype, device=device))
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, dtype=params_dtype, device=device))
        else:
            self.bias = torch.Tensor()
        self.seen = []

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        self.seen.append(ACTIVE[-1] if ACTIVE else None)
        return nn.functional.linear(inp, self.weight, self.bias if self.bias.numel() else None)


class LayerNorm(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device))
        self.bias = nn.Parameter(torch.zeros(hidden_size, device=device))

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(inp, self.weight.shape, self.weight, self.bias, self.eps)


@contextlib.contextmanager
def autocast(
    enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None
) -> Iterator[None]:
    ACTIVE.append(recipe if enabled else None)
    try:
        yield
    finally:
        ACTIVE.pop()


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None
) -> Iterator[None]:
    with autocast(enabled, calibrating, fp8_recipe, fp8_group):
        yield


@dataclass(frozen=True)
class Release:
    """What one release offers."""

    pytorch: dict[str, Any]
    recipe: dict[str, Any] = field(default_factory=dict)


_LAYERS = {"Linear": Linear, "LayerNorm": LayerNorm}
RELEASES = {
    "old": Release({**_LAYERS, "fp8_autocast": fp8_autocast}, {"Format": Format, "DelayedScaling": OldDelayedScaling}),
    "new": Release(
        {**_LAYERS, "autocast": autocast},
        {
            "Format": Format,
            "DelayedScaling": DelayedScaling,
            "Float8CurrentScaling": Float8CurrentScaling,
            "Float8BlockScaling": Float8BlockScaling,
            "MXFP8BlockScaling": MXFP8BlockScaling,
        },
    ),
}


def modules(release: str) -> dict[str, ModuleType]:
    """What to put into `sys.modules`."""
    offered = RELEASES[release]
    made = {}
    for name, content in (("", {}), (".pytorch", offered.pytorch), (".common", {}), (".common.recipe", offered.recipe)):
        module = ModuleType(f"transformer_engine{name}")
        vars(module).update(content)
        made[module.__name__] = module
    return made
