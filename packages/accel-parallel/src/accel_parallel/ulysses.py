"""Attention over a sequence that ranks share, by exchanging: every rank computes some heads over all positions.

Shape suffixes: B batch, H heads of queries, G heads of keys and values, T positions of the whole sequence, t those of
this rank, h heads of this rank, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_state.errors import PlanError


def ulysses_attention(
    q_BHtD: Tensor,
    k_BGtD: Tensor,
    v_BGtD: Tensor,
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    group: dist.ProcessGroup,
) -> Tensor:
    """Any attention over the whole sequence, from this rank's positions and for them.

    Heads of keys that are fewer than ranks, or do not divide by them, are repeated, so that every rank has those that
    its queries belong to; their gradients are summed.

    Args:
        q_BHtD, k_BGtD, v_BGtD: this rank's contiguous part of the sequence, the ranks in its order; G divides H, and the
            number of ranks divides H.
        attention: gets q_BhTD, k_BgTD, v_BgTD of some heads, where g divides h, and returns out_BhTD.
        group: the ranks that share the sequence.

    Raises:
        PlanError: the heads cannot be dealt.

    Cost: exchanges queries, keys, values and the result, in forward and backward; (n-1)/n of each rank's part is sent.
    Source: Jacobs et al. 2023 (DeepSpeed Ulysses).
    """
    ranks = dist.get_world_size(group)
    heads, key_heads = q_BHtD.shape[1], k_BGtD.shape[1]
    if heads % ranks:
        raise PlanError(f"{heads} heads cannot be dealt to sp_size={ranks}: choose an sp size that divides them")
    if heads % key_heads:
        raise PlanError(f"{heads} heads of queries cannot share {key_heads} heads of keys: their number has to divide")
    repeats = math.lcm(key_heads, ranks) // key_heads
    if repeats > 1:
        k_BGtD, v_BGtD = (x.repeat_interleave(repeats, 1) for x in (k_BGtD, v_BGtD))
    out_BhTD = attention(*(exchange(x, group, split=1, join=2) for x in (q_BHtD, k_BGtD, v_BGtD)))
    return exchange(out_BhTD, group, split=2, join=1)


def exchange(x: Tensor, group: dist.ProcessGroup, *, split: int, join: int) -> Tensor:
    """Send the r-th part of `x` along the dim `split` to rank r, and join what comes along the dim `join`.

    Cost: an all-to-all of `x`, and one of its gradient in backward.
    """
    exchanged: Tensor = _Exchange.apply(x, group, split, join)
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:  # type: ignore[override]
        ctx.inverse = group, join, split
        sent = torch.stack(x.chunk(dist.get_world_size(group), split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(0), join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _Exchange.apply(grad, *ctx.inverse), None, None, None
