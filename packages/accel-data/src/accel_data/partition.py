"""Which part of one global order belongs to a rank: arithmetic only, no torch, no data.

An order of `n` samples is dealt in rounds. A round is `batch_size * world_size` consecutive samples, rank `r` takes the
`r`-th `batch_size` of them, so after any number of rounds what was consumed is a prefix of the order. That makes a
position mean the same on any number of ranks: a resumed run deals the rest of the order in rounds of its own size.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.errors import DataLoaderError


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One rank's part of an order.

    Args:
        batch_size: samples in one batch of one rank.
        world_size: ranks that share the order.
        rank: whose part this is, 0 <= rank < world_size.
        drop_last: leave out the last round unless it is full.
        even_batches: complete the last round with samples from the start of the order, so that every rank gets as
            many batches, all full. On one rank nothing needs completing, and nothing is.

    Raises:
        DataLoaderError: a size below 1 or a rank out of range.
    """

    batch_size: int
    world_size: int = 1
    rank: int = 0
    drop_last: bool = False
    even_batches: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataLoaderError(f"batch_size is {self.batch_size}; it has to be at least 1.")
        check_rank(self.rank, self.world_size)

    @classmethod
    def of_batches(
        cls, batch_size: int, world_size: int, rank: int, *, split_batches: bool, drop_last: bool, even_batches: bool
    ) -> Partition:
        """The partition of a stream of batches: each rank takes whole ones, or its part of each.

        Raises:
            DataLoaderError: under `split_batches`, a batch size that is no multiple of the world size.
        """
        if split_batches and batch_size % world_size:
            raise DataLoaderError(
                f"To use split_batches=True, the batch size ({batch_size}) needs to be a round multiple of the "
                f"number of processes ({world_size}). Use such a batch size, or split_batches=False."
            )
        return cls(
            batch_size=batch_size // world_size if split_batches else batch_size,
            world_size=world_size,
            rank=rank,
            drop_last=drop_last,
            even_batches=even_batches,
        )

    @property
    def round_size(self) -> int:
        """Samples that all ranks together take in one step."""
        return self.batch_size * self.world_size

    @property
    def pads(self) -> bool:
        """Whether a short last round is completed."""
        return self.even_batches and not self.drop_last and self.world_size > 1

    def num_batches(self, remaining: int) -> int:
        """This rank's batches when `remaining` samples of the order are left."""
        rounds, rest = divmod(max(remaining, 0), self.round_size)
        if rest == 0 or self.drop_last:
            return rounds
        return rounds + (self.pads or rest > self.rank * self.batch_size)

    def begin(self, step: int) -> int:
        """Where this rank's batch of round `step` begins, counted from the first sample that was left."""
        return step * self.round_size + self.rank * self.batch_size

    def real_in_batch(self, remaining: int, step: int) -> int:
        """How many samples of this rank's batch of round `step` are not padding."""
        return min(max(remaining - self.begin(step), 0), self.batch_size)

    def first_dry(self, rest: int) -> int | None:
        """The first rank that gets nothing of a last round of `rest` samples; None if all get some, or none do."""
        with_data = -(-rest // self.batch_size)
        return None if rest == 0 or self.pads or self.drop_last or with_data >= self.world_size else with_data

    def remainder(self, remaining: int) -> int:
        """Real samples in a last round that is short; 0 when every round is full, -1 when a short one is dropped."""
        rest = max(remaining, 0) % self.round_size
        return -1 if self.drop_last and rest else rest


def check_rank(rank: int, world_size: int) -> None:
    """Raise DataLoaderError unless 0 <= rank < world_size."""
    if world_size < 1:
        raise DataLoaderError(f"num_processes is {world_size}; it has to be at least 1.")
    if not 0 <= rank < world_size:
        raise DataLoaderError(
            f"process_index is {rank}, but with num_processes={world_size} it has to lie in 0..{world_size - 1}."
        )
