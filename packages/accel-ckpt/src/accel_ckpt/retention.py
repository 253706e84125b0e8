"""Which checkpoints to keep: small rules, combined by `|`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from accel_state.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A committed checkpoint, as its manifest tells.

    Args:
        path: its directory.
        step: the update that it was saved at.
        metrics: as saved.
        created_unix_s: by the saver's clock.
    """

    path: Path
    step: int
    metrics: dict[str, float]
    created_unix_s: float


@dataclass(frozen=True)
class Keep:
    """A retention rule; `a | b` keeps what either keeps.

    Args:
        text: how it was written, for messages.
        choose: of all checkpoints, oldest first, those to keep.
        metrics: what each save has to report for the rule to work.
    """

    text: str
    choose: Callable[[Sequence[CheckpointInfo]], Sequence[CheckpointInfo]]
    metrics: frozenset[str] = frozenset()

    def __or__(self, other: Keep) -> Keep:
        return Keep(
            f"{self.text} | {other.text}",
            lambda all_: [*self.choose(all_), *other.choose(all_)],
            self.metrics | other.metrics,
        )

    def __repr__(self) -> str:
        return self.text


def latest(n: int = 1) -> Keep:
    """Keep the n newest (highest steps)."""
    _positive("latest", "n", n)
    return Keep(f"latest({n})", lambda all_: all_[-n:])


def best(metric: str, n: int = 1, mode: Literal["min", "max"] = "min") -> Keep:
    """Keep the n with the best value of a metric; NaN is worst, the earlier of equals is better.

    Args:
        metric: its name in `save(..., metrics={...})`, which then has to give it.
        n: how many.
        mode: whether smaller (a loss) or larger (an accuracy) is better.
    """
    _positive("best", "n", n)
    if mode not in ("min", "max"):
        raise CheckpointError(f"best(mode={mode!r}): allowed are 'min' and 'max'.")

    def rank(info: CheckpointInfo) -> float:
        value = info.metrics[metric]
        if math.isnan(value):
            return math.inf
        return value if mode == "min" else -value

    def choose(all_: Sequence[CheckpointInfo]) -> Sequence[CheckpointInfo]:
        return sorted((info for info in all_ if metric in info.metrics), key=rank)[:n]

    return Keep(f"best({metric!r}, n={n}, mode={mode!r})", choose, frozenset({metric}))


def every(k: int) -> Keep:
    """Keep those whose step is a multiple of k."""
    _positive("every", "k", k)
    return Keep(f"every({k})", lambda all_: [info for info in all_ if info.step % k == 0])


def _positive(rule: str, name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{rule}({name}={value!r}): give an int of at least 1.")
