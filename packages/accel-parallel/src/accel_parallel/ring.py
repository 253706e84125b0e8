"""Attention over a sequence that ranks share: keys and values travel, each rank keeps its queries and merges the parts.

Every rank holds two of the sequence's 2n chunks, the r-th from the start and the r-th from the end, so that under a
causal mask all ranks have equally much to do in every step (`blocks`).

Legend of shape suffixes: b batch, h heads of queries, g heads of keys and values, r heads of queries per head of keys,
q query positions, k key positions, d width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_ALL = slice(None)


@dataclass(frozen=True)
class Ring:
    """The ranks of a sequence, and how keys and values get from one to the others.

    Args:
        group: in the order of the sequence.
        rotation: "allgather" takes the keys and values of all ranks at once; "alltoall" passes them on from rank to
            rank while it computes, and holds two ranks' at a time.
    """

    group: dist.ProcessGroup
    rotation: str = "allgather"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return dist.get_rank(self.group)

    def travel(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every rank's `x` with its rank, beginning with this one's."""
        rank, size = self.rank, self.size
        if self.rotation == "allgather":
            everything = [torch.empty_like(x) for _ in range(size)]
            dist.all_gather(everything, x, self.group)
            yield from (((rank - step) % size, everything[(rank - step) % size]) for step in range(size))
            return
        for step in range(size):
            is_last = step == size - 1
            following, sending = (x, []) if is_last else self._pass_on(x)
            yield (rank - step) % size, x
            for work in sending:
                work.wait()
            x = following

    def bring_home(self, parts: Iterator[tuple[int, Tensor]]) -> Tensor:
        """This rank's sum of what all ranks have for it.

        Args:
            parts: for each rank its part, in the order of `travel`.
        """
        if self.rotation == "allgather":
            in_order = [part for _, part in sorted(parts, key=lambda item: item[0])]
            own = torch.empty_like(in_order[0])
            dist.reduce_scatter(own, in_order, group=self.group)
            return own
        total: Tensor | None = None
        for _, part in parts:
            total, sending = self._pass_on(part if total is None else total.add_(part))
            for work in sending:
                work.wait()
        assert total is not None
        return total

    def _pass_on(self, x: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Begin to send `x` to the next rank; where the previous one's will be, and what to wait for."""
        received = torch.empty_like(x)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return received, dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=self.group, group_peer=after),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=before),
            ]
        )


def ring_attention(
    q_bhqd: Tensor, k_bgkd: Tensor, v_bgkd: Tensor, ring: Ring, *, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """What `scaled_dot_product_attention` gives for this rank's queries and the keys and values of all ranks.

    Exact up to rounding. Under autocast it computes from values in autocast's dtype, as torch's attention does;
    half-precision values are multiplied and summed in fp32.

    Args:
        q_bhqd, k_bgkd, v_bgkd: this rank's shards, in the order of `load_balanced_positions`; g divides h.
        is_causal: no query sees later positions.
        scale: of the scores; 1/sqrt(d) by default.

    Cost: forward sends (n-1)/n of all keys and values to each rank, backward the same and as much in gradients, those
        in fp32. Memory for the scores of one block, q times k per head: a readable reference, not a fused kernel.
    Source: Liu et al. 2023 (ring attention); Milakov and Gimelshein 2018 (merging); Dao et al. 2022 (backward).
    """
    device = q_bhqd.device.type
    if torch.is_autocast_enabled(device):
        q_bhqd, k_bgkd, v_bgkd = (x.to(torch.get_autocast_dtype(device)) for x in (q_bhqd, k_bgkd, v_bgkd))
    scale = q_bhqd.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _RingAttention.apply(q_bhqd, k_bgkd, v_bgkd, ring, is_causal, scale)
    return out


def blocks(own: int, source: int, length: int, is_causal: bool) -> list[tuple[slice, slice, bool]]:
    """Which of this rank's queries see which of a rank's keys: slices of both, and whether on the diagonal.

    Args:
        own, source: the rank of the queries and that of the keys.
        length: of a rank's shard, its chunk from the sequence's start and that from its end.
    """
    if not is_causal:
        return [(_ALL, _ALL, False)]
    start, end = slice(None, length // 2), slice(length // 2, None)
    if source == own:
        return [(start, start, True), (end, start, False), (end, end, True)]
    return [(_ALL, start, False)] if source < own else [(end, _ALL, False)]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_bhqd: Tensor, k_bgkd: Tensor, v_bgkd: Tensor, ring: Ring, is_causal: bool, scale: float
    ) -> Tensor:
        ctx.ring, ctx.is_causal, ctx.scale, ctx.widths = ring, is_causal, scale, (k_bgkd.shape[-1], v_bgkd.shape[-1])
        with torch.autocast(q_bhqd.device.type, enabled=False):
            q_bgrqd = _by_key_heads(q_bhqd, k_bgkd.shape[1])
            out_bgrqd = q_bgrqd.new_zeros(*q_bgrqd.shape[:-1], v_bgkd.shape[-1])
            lse_bgrq = q_bgrqd.new_full(q_bgrqd.shape[:-1], -torch.inf)
            for source, kv_bgkd in ring.travel(torch.cat([k_bgkd, v_bgkd], -1)):
                k, v = _compute_dtype(kv_bgkd).split(ctx.widths, -1)
                for queries, keys, on_diagonal in blocks(ring.rank, source, q_bhqd.shape[2], is_causal):
                    scores = _scores(q_bgrqd[..., queries, :], k[..., keys, :], scale, on_diagonal)
                    _merge(out_bgrqd[..., queries, :], lse_bgrq[..., queries], scores, v[..., keys, :])
        out_bhqd = out_bgrqd.flatten(1, 2).to(q_bhqd.dtype)
        ctx.save_for_backward(q_bhqd, k_bgkd, v_bgkd, out_bhqd, lse_bgrq)
        return out_bhqd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_bhqd: Tensor) -> tuple[Tensor | None, ...]:
        q_bhqd, k_bgkd, v_bgkd, out_bhqd, lse_bgrq = ctx.saved_tensors
        heads = k_bgkd.shape[1]
        with torch.autocast(q_bhqd.device.type, enabled=False):
            q, out, grad = (_by_key_heads(x, heads) for x in (q_bhqd, out_bhqd, grad_bhqd))
            delta_bgrq = (out * grad).sum(-1)
            dq = torch.zeros_like(q)

            def gradients_of_keys_and_values() -> Iterator[tuple[int, Tensor]]:
                for source, kv_bgkd in ctx.ring.travel(torch.cat([k_bgkd, v_bgkd], -1)):
                    kv = _compute_dtype(kv_bgkd)
                    dkv = torch.zeros_like(kv)
                    (k, v), (dk, dv) = kv.split(ctx.widths, -1), dkv.split(ctx.widths, -1)
                    for rows, columns, on_diagonal in blocks(ctx.ring.rank, source, q.shape[-2], ctx.is_causal):
                        scores = _scores(q[..., rows, :], k[..., columns, :], ctx.scale, on_diagonal)
                        weights_bgrqk = (scores - lse_bgrq[..., rows, None]).exp()
                        dweights = grad[..., rows, :] @ v[:, :, None, columns].mT
                        dscores = weights_bgrqk * (dweights - delta_bgrq[..., rows, None]) * ctx.scale
                        dq[..., rows, :] += dscores @ k[:, :, None, columns]
                        dk[..., columns, :] += (dscores.mT @ q[..., rows, :]).sum(2)
                        dv[..., columns, :] += (weights_bgrqk.mT @ grad[..., rows, :]).sum(2)
                    yield source, dkv

            dk, dv = ctx.ring.bring_home(gradients_of_keys_and_values()).split(ctx.widths, -1)
        return dq.flatten(1, 2).to(q_bhqd.dtype), dk.to(k_bgkd.dtype), dv.to(v_bgkd.dtype), None, None, None


def _compute_dtype(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _by_key_heads(x_bhqd: Tensor, heads: int) -> Tensor:
    """Queries beside the head of keys that they share (grouped-query attention)."""
    x_bgrqd: Tensor = _compute_dtype(x_bhqd).unflatten(1, (heads, -1))
    return x_bgrqd


def _scores(q_bgrqd: Tensor, k_bgkd: Tensor, scale: float, on_diagonal: bool) -> Tensor:
    scores_bgrqk: Tensor = q_bgrqd @ k_bgkd[:, :, None].mT * scale
    if on_diagonal:
        later_qk = torch.ones(scores_bgrqk.shape[-2:], dtype=torch.bool, device=scores_bgrqk.device).triu(1)
        scores_bgrqk.masked_fill_(later_qk, -torch.inf)
    return scores_bgrqk


def _merge(out_bgrqd: Tensor, lse_bgrq: Tensor, scores_bgrqk: Tensor, v_bgkd: Tensor) -> None:
    """Add more keys to what queries have seen so far, in place.

    Each part weighs by its share of the softmax's denominator. Every query sees a key of each block that it takes part
    in, so the logarithm of the new denominator is finite.
    """
    total_bgrq = torch.logaddexp(lse_bgrq, scores_bgrqk.logsumexp(-1))
    part_bgrqd = (scores_bgrqk - total_bgrq[..., None]).exp() @ v_bgkd[:, :, None]
    out_bgrqd.mul_((lse_bgrq - total_bgrq).exp()[..., None]).add_(part_bgrqd)
    lse_bgrq.copy_(total_bgrq)
