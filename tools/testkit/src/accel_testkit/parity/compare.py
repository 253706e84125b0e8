"""How far two loops are apart, and how far they may be."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from accel_state.testing import run_ranks
from accel_testkit.parity import loops
from accel_testkit.parity.table import MOST_EXAMPLES, NETS, STRATEGIES, Data, Row, Setting

DERIVATION = """\
Compared are the gradient's norm before clipping, as the largest relative deviation over updates and ranks, and the way
that all weights together have gone in five updates, as one vector: |ours - by hand| / |by hand - begin|. Rows with SGD
and without clipping decide the gradient's scale; clipping and AdamW forgive a wrong one, and are there for their state.

- **fp32, 1e-5.** Both loops sum the same numbers, some hundred of them one after the other, in another order. Each sum
  is rounded by 2^-24, 6e-8; a hundred in a row that all err to one side make 6e-6. Over five updates SGD with momentum
  only adds such errors, in the proportion in which it adds gradients. A mean of weights (local SGD) rounds the weights
  themselves, which are 20 to 80 times as long as the way: five such roundings, each to a side of its own and by
  2^-24/sqrt(3) in the mean square, make 1.5e-6 to 6e-6.
- **fp32 under AdamW, 1e-5.** A step divides a gradient by its size plus eps, which is 1e-4 here. An error e of an entry
  of usual size s counts as e/(|g|+eps) of a step; with entries spread evenly about zero its mean square over all is
  about e^2/(s eps), so the way is off by (e/s) sqrt(s/eps). With e/s = 2^-24 times a few, and s from 1e-3 to 4e-2 by
  the nets' norms and sizes, these are 1e-6 times a few.
- **bf16.** A number has 8 bits, so that a rounding is off by 2^-9 of it at most, and two that fall to different sides
  by 2^-8. Twin and ranks round sums of other parts; FSDP rounds parameters and the summed gradients as well. An
  activation's difference and that of the gradient that is multiplied with it make 2^-7, which bounds the norm; ways
  may be twice that, 2^-6, as each update begins where the last one has erred; and under AdamW four times, 2^-5: by the
  formula above, with entries off by 2^-9/sqrt(3) in the mean square, ways are off by 4e-3 to 2.3e-2.
- **A hook that sends fp16**, with fp32 elsewhere: a gradient is rounded when it is cast and when it is summed, by 2^-11
  each: 2^-10 for the norm, 2^-9 for the way, 2^-8 under AdamW by the same proportions."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What one row gave; norms are None where ranks have norms of their own."""

    row: Row
    norm: float | None
    way: float
    max_norm: float
    max_way: float

    @property
    def holds(self) -> bool:
        """Whether both are within their bounds; what is not a number is not."""
        return self.way <= self.max_way and (self.norm is None or self.norm <= self.max_norm)


def bounds(row: Row) -> tuple[float, float]:
    """Of the norm and of the way, see `DERIVATION`."""
    is_adamw = row.setting.optimizer == "adamw"
    if row.setting.precision == "bf16":
        return 2**-7, 2**-5 if is_adamw else 2**-6
    if STRATEGIES[row.strategy].hook is not None:
        return 2**-10, 2**-8 if is_adamw else 2**-9
    return 1e-5, 1e-5


@functools.cache
def data_of(net: str) -> Data:
    """Examples for the longest run; shorter ones take the first of them."""
    return NETS[net].data(MOST_EXAMPLES)


@functools.cache
def by_hand(net: str, setting: Setting) -> loops.Outcome:
    """The loop in raw torch, which all strategies are compared with."""
    return loops.by_hand(net, data_of(net), setting)


def run(strategy: str, net: str, rows: Sequence[Row]) -> list[Comparison]:
    """Compare rows of one strategy and net, all of them in one group of processes."""
    settings = [row.setting for row in rows]
    ranks, timeout_s = STRATEGIES[strategy].ranks, 60 + 30 * len(rows)
    by_rank = run_ranks(loops.through_accelerator, ranks, strategy, net, data_of(net), settings, timeout_s=timeout_s)
    return [compare(row, outcomes) for row, *outcomes in zip(rows, *by_rank, strict=True)]


def compare(row: Row, outcomes: Iterable[loops.Outcome]) -> Comparison:
    """The ranks' outcomes with that of the loop by hand.

    Raises:
        AssertionError: the ranks together do not have the net's parameters, or made another number of updates.
    """
    want, outcomes = by_hand(row.net, row.setting), list(outcomes)
    got = {name: value for outcome in outcomes for name, value in outcome.weights.items()}
    assert got.keys() == want.weights.keys(), f"{row}: {got.keys() ^ want.weights.keys()} are not in both"
    begin = NETS[row.net].build().state_dict()
    apart, way = (
        torch.cat([(weights[name] - value).double().flatten() for name, value in want.weights.items()]).norm().item()
        for weights in (got, begin)
    )
    norm = None
    if not STRATEGIES[row.strategy].is_local:
        pairs = [pair for outcome in outcomes for pair in zip(outcome.norms, want.norms, strict=True)]
        norm = max(abs(ours - wanted) / wanted for ours, wanted in pairs)
    max_norm, max_way = bounds(row)
    return Comparison(row=row, norm=norm, way=apart / way, max_norm=max_norm, max_way=max_way)
