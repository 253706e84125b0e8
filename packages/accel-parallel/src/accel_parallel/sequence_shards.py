"""Which part of a sequence a rank of the cp or sp axis holds."""

from __future__ import annotations

import torch
from torch import Tensor

from accel_state.errors import PlanError

IGNORED_LABEL = -100
"""The label of positions that no loss is taken of, as torch's `cross_entropy` has it."""


def load_balanced_positions(length: int, ranks: int, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """The positions that a rank of the cp axis holds, in its order: a chunk from the start, its mirror from the end.

    Under a causal mask the first positions see few and the last ones many; together every rank has equally much to do.

    Args:
        length: of the whole sequence, a multiple of `2 * ranks`.

    Raises:
        PlanError: it is not.
    """
    if length % (2 * ranks):
        raise PlanError(
            f"a sequence of {length} positions cannot be dealt to cp_size={ranks}, each of whose ranks takes two equal "
            f"chunks: pad it to a multiple of {2 * ranks}, such as {-(-length // (2 * ranks)) * 2 * ranks}"
        )
    chunk = length // (2 * ranks)
    start = torch.arange(rank * chunk, (rank + 1) * chunk, device=device)
    return torch.cat([start, torch.arange(length - (rank + 1) * chunk, length - rank * chunk, device=device)])


def shift_labels(labels_bt: Tensor) -> Tensor:
    """Each position's next token, for a loss without a shift: to be made before a sequence is cut.

    The last position has none, and gets `IGNORED_LABEL`.
    """
    return torch.nn.functional.pad(labels_bt[..., 1:], (0, 1), value=IGNORED_LABEL)


def shard_along(x: Tensor, dim: int, ranks: int, rank: int) -> Tensor:
    """A rank's contiguous part of a sequence along `dim`, as the sp axis deals it, in memory of its own.

    Raises:
        PlanError: the parts would not be equal.
    """
    if x.shape[dim] % ranks:
        raise PlanError(
            f"a sequence of {x.shape[dim]} positions cannot be dealt to sp_size={ranks} evenly: pad it to a multiple, "
            f"such as {-(-x.shape[dim] // ranks) * ranks}, with labels {IGNORED_LABEL}"
        )
    return x.chunk(ranks, dim)[rank].contiguous()
