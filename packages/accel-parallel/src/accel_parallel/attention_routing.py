"""Calls of torch's attention inside a block of code, handed to a function that knows about the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from accel_state.errors import PlanError

Attend = Callable[..., Tensor]
"""`attend(q, k, v, *, dropout_p, is_causal, scale)` over tensors of shape (batch, heads, positions, width)."""


class RoutedAttention(TorchFunctionMode):
    """A block in which `scaled_dot_product_attention` runs `attend` instead.

    Masks are refused: which positions they mean is not known once a sequence is cut.

    Args:
        attend: gets four-dimensional tensors; fewer heads of keys than of queries stand for grouped-query attention.
        why: begins the message where a call cannot be routed, such as "under cp".

    Cost: every torch function called from Python inside the block goes through here, about a microsecond each.
    """

    def __init__(self, attend: Attend, why: str) -> None:
        super().__init__()
        self.attend, self.why = attend, why

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._routed(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            raise PlanError(
                f"{self.why} torch.nn.MultiheadAttention cannot be shared over ranks, because it computes the scores "
                "of this rank's tokens by itself: use a module that calls scaled_dot_product_attention"
            )
        return func(*args, **(kwargs or {}))

    def _routed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise PlanError(
                f"{self.why} attention got a mask of shape {tuple(attn_mask.shape)}, and this rank's tokens are only a "
                "part of the sequence that it speaks of: causal attention (is_causal=True) and full attention can be "
                "shared. Under causal attention padding at the end needs no mask; give its labels -100"
            )
        if key.shape[-3] != query.shape[-3] and not enable_gqa:
            raise PlanError(
                f"attention of {query.shape[-3]} heads of queries over {key.shape[-3]} of keys needs enable_gqa=True"
            )
        q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        out = self.attend(q, k, v, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
        return out.reshape(*query.shape[:-1], value.shape[-1])
