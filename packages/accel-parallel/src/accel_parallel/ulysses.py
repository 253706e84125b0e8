"""Attention over a sequence that ranks share, by exchanging: every rank computes some heads over all positions.

Legend of shape suffixes: b batch, t positions of the whole sequence, s those of this rank's part, h all heads of
queries, g all heads of keys and values, n and m those that this rank computes, d width of a head.
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
    q_bhsd: Tensor,
    k_bgsd: Tensor,
    v_bgsd: Tensor,
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    group: dist.ProcessGroup,
) -> Tensor:
    """Any attention over the whole sequence, from this rank's positions and for them.

    Heads of keys that are fewer than ranks, or do not divide by them, are repeated, so that every rank has those that
    its queries belong to; their gradients are summed.

    Args:
        q_bhsd, k_bgsd, v_bgsd: this rank's contiguous part of the sequence, the ranks in its order; g divides h,
            and the number of ranks divides h.
        attention: gets q_bntd, k_bmtd, v_bmtd of some heads, where m divides n, and returns out_bntd.
        group: the ranks that share the sequence.

    Raises:
        PlanError: the heads cannot be dealt.

    Cost: exchanges queries, keys, values and the result, in forward and backward; (n-1)/n of each rank's part is sent.
    Source: Jacobs et al. 2023 (DeepSpeed Ulysses).
    """
    ranks = dist.get_world_size(group)
    heads, key_heads = q_bhsd.shape[1], k_bgsd.shape[1]
    if heads % ranks:
        raise PlanError(f"{heads} heads cannot be dealt to sp_size={ranks}: choose an sp size that divides them")
    if heads % key_heads:
        raise PlanError(f"{heads} heads of queries cannot share {key_heads} heads of keys: their number has to divide")
    repeats = math.lcm(key_heads, ranks) // key_heads
    if repeats > 1:
        k_bgsd, v_bgsd = (x.repeat_interleave(repeats, 1) for x in (k_bgsd, v_bgsd))
    out_bntd = attention(*(exchange(x, group, split=1, join=2) for x in (q_bhsd, k_bgsd, v_bgsd)))
    return exchange(out_bntd, group, split=2, join=1)


def exchange(x: Tensor, group: dist.ProcessGroup, *, split: int, join: int) -> Tensor:
    """Send the r-th part of `x` along the dim `split` to rank r, and join what comes along the dim `join`.

    Cost: an all-to-all of `x`, and one of its gradient in backward.
    """
    exchanged: Tensor = _Exchange.apply(x, group, split, join)
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
        ctx.inverse = group, join, split
        sent = torch.stack(x.chunk(dist.get_world_size(group), split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(0), join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(grad, *ctx.inverse), None, None, None
