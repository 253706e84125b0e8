"""Ranks whose streams have unknown and unequal lengths agree on how many batches are served.

Each rank reads a window of K batches ahead and tells the others, in one asynchronous all-reduce on the CPU, how many it
found and where its shards stand after each. It is issued a step before its result is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_state.errors import CollectiveMismatchError, DataLoaderError

from .wire import job_timeout

_FAILED = -1  # instead of a count
WINDOW = 8  # batches read ahead; one small all-reduce per so many steps


@dataclass(frozen=True)
class Window:
    """What all ranks found in one window.

    Args:
        counts: batches, by rank.
        positions: of all shards after each of the window's steps, WINDOW rows.
    """

    counts: list[int]
    positions: list[tuple[int, ...]]


class Agreement:
    """Windows of several ranks put together.

    Args:
        world_size, rank: who takes part. Without a process group of that size a rank is on its own.
        num_shards: positions to exchange.
    """

    def __init__(self, world_size: int, rank: int, num_shards: int) -> None:
        self.rank = rank
        self.num_shards = num_shards
        has_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size
        self.world_size = world_size if has_group and world_size > 1 else 1
        self._group: Any = dist.new_group(backend="gloo", timeout=job_timeout()) if self.world_size > 1 else None
        self._last_word: Proposal | None = None

    def propose(self, count: int, own: list[tuple[int, ...]], shards: range) -> Proposal:
        """Tell the others what this rank found.

        Args:
            count: batches in this window.
            own: positions after each of the window's steps, of which only those of `shards` matter.
            shards: this rank's.
        """
        row = self._row(count)
        positions = row[self.world_size :].view(WINDOW, self.num_shards)
        mine = torch.tensor(own, dtype=torch.int64)
        if self._group is None:
            positions.copy_(mine)
            return Proposal(row, self.world_size, None)
        index = torch.tensor(shards)
        positions[:, index] = mine[:, index]
        return Proposal(row, self.world_size, dist.all_reduce(row, group=self._group, async_op=True))

    def give_up(self) -> None:
        """Instead of a window: let the others fail at it too. Does not wait for them."""
        if self._group is not None:
            row = self._row(_FAILED)
            self._last_word = Proposal(row, self.world_size, dist.all_reduce(row, group=self._group, async_op=True))

    def _row(self, count: int) -> Tensor:
        row = torch.zeros(self.world_size + WINDOW * self.num_shards, dtype=torch.int64)
        row[self.rank if self._group is not None else 0] = count
        return row


@dataclass(frozen=True)
class Proposal:
    """A window that is under way."""

    row: Tensor
    world_size: int
    work: Any

    def result(self) -> Window:
        """Wait for the other ranks, for as long as the process group waits.

        Raises:
            CollectiveMismatchError: one did not come.
            DataLoaderError: one could not read its shards.
        """
        try:
            if self.work is not None:
                self.work.wait()
        except RuntimeError as error:
            raise CollectiveMismatchError(
                f"Another rank did not say how many batches of the stream it found: {error}. It failed, or does not "
                "iterate this loader; look for its error above."
            ) from error
        numbers: list[int] = self.row[: self.world_size].tolist()
        if _FAILED in numbers:
            failed = ", ".join(str(rank) for rank, number in enumerate(numbers) if number == _FAILED)
            raise DataLoaderError(f"Rank {failed} could not read its shards of the stream; its own error says why.")
        return Window(numbers, [tuple(step) for step in self.row[self.world_size :].view(WINDOW, -1).tolist()])
