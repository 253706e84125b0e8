"""Ranks whose streams have unknown and unequal lengths agree on how many batches are served.

Each rank reads a window of K batches ahead and tells the others, in one asynchronous all-reduce on the CPU, how many it
found and where its shards stand after each. It is issued a step before its result is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_state.errors import CollectiveMismatchError, DataLoaderError

from .wire import job_timeout

WINDOW = 8  # batches read ahead; one small all-reduce per so many steps
NOTHING_AT_ALL = -1  # instead of a count: no batch from the start of the shards on
_FAILED = -2  # likewise: the shards cannot be read
_WINDOWS_PER_PASS = 1 << 40  # more than any pass has, so that pass and window make one number


@dataclass(frozen=True)
class Window:
    """What all ranks found in one window.

    Args:
        counts: batches, by part; or `NOTHING_AT_ALL`.
        codes: the places in all shards after each of the window's steps, WINDOW rows.
    """

    counts: list[int]
    codes: list[tuple[int, ...]]


class Agreement:
    """Windows of several ranks put together.

    Args:
        part_of_rank: every rank's part; those with the same part read the same. Without a process group of so many
            ranks, this one is on its own.
        part: of this rank.
        num_shards: places to exchange.
    """

    def __init__(self, part_of_rank: Sequence[int], part: int, num_shards: int) -> None:
        has_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() == len(part_of_rank)
        self.is_shared = has_group and max(part_of_rank) > 0
        self.num_shards = num_shards
        self._rank = dist.get_rank() if self.is_shared else 0
        self._readers = [part_of_rank.index(one) for one in range(max(part_of_rank) + 1)] if self.is_shared else [0]
        self._num_ranks = len(part_of_rank) if self.is_shared else 1
        self._group: Any = dist.new_group(backend="gloo", timeout=job_timeout()) if self.is_shared else None
        self._is_reader = not self.is_shared or self._rank == self._readers[part]
        self._serial = 0
        self._latest: Proposal | None = None

    def begin(self) -> None:
        """A new pass. Where the one before was left with a window under way, see that all ranks left it there."""
        if self._latest is not None and not self._latest.is_over:
            self._latest.result()
        self._serial = (self._serial // _WINDOWS_PER_PASS + 1) * _WINDOWS_PER_PASS

    def propose(self, count: int, own: list[tuple[int, ...]], shards: Sequence[int]) -> Proposal:
        """Tell the others what this rank found.

        Args:
            count: batches in this window, or `NOTHING_AT_ALL`.
            own: places after each of the window's steps, of which only those of `shards` matter.
            shards: this rank's.
        """
        mine = torch.tensor(own, dtype=torch.int64)
        if not self.is_shared:
            return Proposal([count], mine)
        row = self._row(count)
        if self._is_reader:
            index = torch.tensor(shards)
            row[2 * self._num_ranks :].view(WINDOW, self.num_shards)[:, index] = mine[:, index]
        return self._sent(row)

    def give_up(self) -> None:
        """Instead of a window: let the others fail at it too. Does not wait for them."""
        if self.is_shared:
            self._sent(self._row(_FAILED)).is_over = True

    def _row(self, count: int) -> Tensor:
        """Every rank's count, then its serial number, then places; a sum of rows puts them together."""
        row = torch.zeros(2 * self._num_ranks + WINDOW * self.num_shards, dtype=torch.int64)
        row[self._rank], row[self._num_ranks + self._rank] = count, self._serial
        self._serial += 1
        return row

    def _sent(self, row: Tensor) -> Proposal:
        work = dist.all_reduce(row, group=self._group, async_op=True)
        self._latest = Proposal(self._readers, row, self._num_ranks, work)
        return self._latest


@dataclass
class Proposal:
    """A window that is under way.

    Args:
        counts_at: where the parts' counts lie in the row; of a rank on its own, its count.
        row: what is summed over the ranks; of a rank on its own, its places.
        num_ranks: 0 for a rank on its own.
        work: the sum.
        is_over: whether somebody has waited for it, or nobody has to.
    """

    counts_at: list[int]
    row: Tensor
    num_ranks: int = 0
    work: Any = None
    is_over: bool = False

    def result(self) -> Window:
        """Wait for the other ranks, for as long as the process group waits.

        Raises:
            CollectiveMismatchError: one did not come, or is elsewhere.
            DataLoaderError: one could not read its shards.
        """
        self.is_over = True
        if self.work is None:
            return Window(self.counts_at, [tuple(step) for step in self.row.tolist()])
        try:
            self.work.wait()
        except RuntimeError as error:
            raise CollectiveMismatchError(
                f"Another rank did not say how many batches of the stream it found: {error}. It failed, or does not "
                "iterate this loader; look for its error above."
            ) from error
        counts: list[int] = self.row[: self.num_ranks].tolist()
        serials: list[int] = self.row[self.num_ranks : 2 * self.num_ranks].tolist()
        if _FAILED in counts:
            failed = ", ".join(str(rank) for rank, count in enumerate(counts) if count == _FAILED)
            raise DataLoaderError(f"Rank {failed} could not read its shards of the stream; its own error says why.")
        if len(set(serials)) > 1:
            raise CollectiveMismatchError(_apart(serials))
        codes = self.row[2 * self.num_ranks :].view(WINDOW, -1).tolist()
        return Window([counts[rank] for rank in self.counts_at], [tuple(step) for step in codes])


def _apart(serials: list[int]) -> str:
    places = ", ".join(
        f"rank {rank} iterates it for the {serial // _WINDOWS_PER_PASS}. time and has read "
        f"{serial % _WINDOWS_PER_PASS * WINDOW} batches"
        for rank, serial in enumerate(serials)
    )
    return (
        f"Ranks that read a stream in shards have to go through it together, but {places}. Leave the loop at the same "
        "step on every rank."
    )
