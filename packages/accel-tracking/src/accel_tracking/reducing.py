"""One number out of every rank's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accel_state.errors import TrackerError

from .values import scalar

RULES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda numbers: math.fsum(numbers) / len(numbers) if all(map(math.isfinite, numbers)) else _odd(numbers),
    "sum": lambda numbers: math.fsum(numbers) if all(map(math.isfinite, numbers)) else _odd(numbers),
    "min": lambda numbers: math.nan if any(map(math.isnan, numbers)) else min(numbers),
    "max": lambda numbers: math.nan if any(map(math.isnan, numbers)) else max(numbers),
}
"""Name to rule; a NaN on any rank stays one."""


def reduce_over_ranks(values: Mapping[str, Any], rule: str) -> dict[str, Any]:
    """The values with each number reduced over all ranks; text and the like are rank 0's. Every rank calls it.

    One collective on the CPU, of a few bytes per value; numbers on an accelerator are waited for.

    Raises:
        TrackerError: an unknown rule, or the ranks' numbers have different names; on every rank.
    """
    if rule not in RULES:
        raise TrackerError(f"log(reduce={rule!r}) is not allowed: give one of {', '.join(map(repr, RULES))}")
    from accel_state import gather_object

    plain_values = {name: scalar(value) for name, value in values.items()}
    numbers = {name: float(value) for name, value in plain_values.items() if isinstance(value, int | float)}
    rows: list[dict[str, float]] = gather_object([numbers])
    for rank, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise TrackerError(
                f"log(reduce={rule!r}) needs numbers of the same names on every rank; rank 0 has "
                f"{sorted(rows[0])}, rank {rank} has {sorted(row)}"
            )
    reduced = {name: RULES[rule]([row[name] for row in rows]) for name in numbers}
    return plain_values | reduced


def _odd(numbers: Sequence[float]) -> float:
    """The sum where it is no finite number: `fsum` raises there."""
    return sum(numbers)
