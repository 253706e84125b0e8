"""What collectives over nested tensors begin and end with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from accel_state import process_group
from accel_state.collectives import layout
from accel_state.collectives.channel import Channel
from accel_state.collectives.trees import map_leaves


def current_channel() -> Channel | None:
    """Our group, or None when this process is the only one."""
    channel = process_group.current_job().channel
    return None if channel is None or channel.world_size == 1 else channel


def flatten(
    channel: Channel,
    tree: Any,
    operation: str,
    shape: layout.Shape,
    takes: Callable[[torch.Tensor], str | None] | None = None,
) -> tuple[list[torch.Tensor], str]:
    """As `layout.flatten`; data that cannot be sent raises on the other ranks too, rather than let them wait."""
    with channel.told_to_others(operation):
        return layout.flatten(tree, operation, shape, takes)


def by_device(leaves: Sequence[torch.Tensor]) -> dict[torch.device, list[int]]:
    """The indices of the tensors of each device."""
    found: dict[torch.device, list[int]] = {}
    for index, leaf in enumerate(leaves):
        found.setdefault(leaf.device, []).append(index)
    return found


def with_leaves(tree: Any, values: Sequence[torch.Tensor]) -> Any:
    """A tree like `tree` with other leaves, in the order of `flatten`."""
    remaining = iter(values)
    return map_leaves(lambda _leaf: next(remaining), tree)
