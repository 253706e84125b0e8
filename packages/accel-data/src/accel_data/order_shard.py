"""`OrderShard`: one rank's batches of a `SampleOrder`, without any loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from .feeds import KnownFeed
from .partition import Partition
from .permutation import SampleOrder
from .position import Fingerprint, Position, position_of, state_of


class OrderShard:
    """Lists of the indices that one rank reads, epoch after epoch; a batch sampler for any loop or loader.

    The state is that of a loader whose sampler is a `PermutationSampler`, and can be exchanged with it. It counts what
    was taken from the iterator: under a torch DataLoader with workers, which takes ahead, use `prepare_data_loader`.

    Args:
        order: of the first epoch.
        index, count: this rank, of so many.
        batch_size: samples in one batch of one rank.
        drop_last: leave out the last round unless it is full.
        even_batches: complete the last round from the start of the order, so that all ranks get as many batches.
    """

    def __init__(
        self,
        order: SampleOrder,
        index: int,
        count: int,
        batch_size: int,
        *,
        drop_last: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.order = order
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._partition = Partition(
            batch_size=batch_size, world_size=count, rank=index, drop_last=drop_last, even_batches=even_batches
        )
        self._consumed = 0

    def __iter__(self) -> Iterator[list[int]]:
        """The rest of the epoch, if one was begun, else a whole one."""
        length = len(self.order)
        for batch in KnownFeed(self.order, self._partition, self._consumed):
            self._consumed = min(self._consumed + self._partition.round_size, length)
            yield batch
        self.set_epoch(self.order.epoch + 1)

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._partition.num_batches(len(self.order))

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of `epoch`; a place within that epoch is kept."""
        if epoch != self.order.epoch:
            self.order, self._consumed = replace(self.order, epoch=epoch), 0

    def state_dict(self) -> dict[str, Any]:
        """Epoch, samples consumed by all ranks, and what they belong to: plain integers and strings."""
        position = Position(epoch=self.order.epoch, consumed=self._consumed)
        return state_of(position, self._fingerprint(), self.order.seed)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a position saved on any number of ranks.

        Raises:
            DataStateError: the state is of a newer version, of another length, or of another kind of order.
        """
        position = position_of(state_dict, self._fingerprint())
        self.order = SampleOrder(len(self.order), int(state_dict["seed"]), position.epoch)
        self._consumed = position.consumed

    def _fingerprint(self) -> Fingerprint:
        return Fingerprint(
            order="permutation",
            unit="samples",
            length=len(self.order),
            batch_size=self.batch_size,
            num_processes=self._partition.world_size,
        )
