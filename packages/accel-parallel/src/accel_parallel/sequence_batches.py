"""Batches of whole sequences, cut for the ranks of the sp axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_state.errors import PlanError

from .sequence_inputs import refuse_padding
from .sequence_shards import shard_along, shift_labels

_TOKENS = ("input_ids", "inputs_embeds")


@dataclass(frozen=True, kw_only=True)
class ShardBatch:
    """Makes of a batch of whole sequences this rank's part of it. See `shard_batch`.

    Args:
        group: the ranks that share sequences, in their order.
        length: that all sequences have to have; None takes any that can be dealt.
    """

    group: dist.ProcessGroup
    length: int | None = None

    def __call__(self, batch: Any) -> dict[str, Any]:
        return shard_batch(batch, dist.get_world_size(self.group), dist.get_rank(self.group), length=self.length)


def shard_batch(batch: Any, ranks: int, rank: int, *, length: int | None = None) -> dict[str, Any]:
    """A rank's part of a batch: every tensor with the sequence's length in its second dim, cut there.

    `labels` are shifted before they are cut, and come as `shift_labels`, so that the last token of a part has its
    label; `position_ids` are added where there are none.

    Args:
        batch: names to tensors, among them "input_ids" of shape (batch, length) or "inputs_embeds".
        ranks, rank: of the sp axis.
        length: that sequences have to have; None takes any that can be dealt.

    Raises:
        PlanError: another kind of batch, another length, one that cannot be dealt evenly, or an `attention_mask` with
            zeros.

    Cost: a copy of the part.
    """
    if not isinstance(batch, Mapping) or not any(isinstance(batch.get(name), Tensor) for name in _TOKENS):
        raise PlanError(
            f"under sp a batch of type {type(batch).__name__} cannot be cut, because nothing says where its sequences "
            "and labels are: let the collate function return a dict with 'input_ids' of shape (batch, length), 'labels'"
        )
    tokens = next(batch[name] for name in _TOKENS if isinstance(batch.get(name), Tensor))
    found = tokens.shape[1]
    if length is not None and found != length:
        raise PlanError(
            f"a batch has sequences of {found} positions, and sp_seq_length={length} is fixed: pad to it, or set "
            "sp_seq_length_is_variable=True"
        )
    whole = dict(batch)
    if whole.get("attention_mask") is not None:
        refuse_padding(whole["attention_mask"], "sp")
    if whole.get("labels") is not None:
        whole["shift_labels"] = shift_labels(whole.pop("labels"))
    if whole.get("position_ids") is None:
        whole["position_ids"] = torch.arange(found, device=tokens.device).expand(tokens.shape[0], -1)
    return {
        name: shard_along(value, 1, ranks, rank)
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == found
        else value
        for name, value in whole.items()
    }
