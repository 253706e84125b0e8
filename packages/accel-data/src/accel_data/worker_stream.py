"""A stream that workers cut for the ranks: how its end in each worker becomes known to the loop.

Each worker reads a stream of its own and cuts it for all ranks, so only it sees that a round is short. It says so after
its last sample, on the way of the samples through the collate function; the loop reads far enough ahead to hear it
before it hands out the batches concerned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from .feeds import Portion, Ragged, Tail


@dataclass(frozen=True)
class StreamEnd:
    """What a worker knows at the end of its stream, the same on every rank but for `tail`.

    Args:
        tail: of this rank's last batch, where it is partly padding.
        remainder: real samples of the last round if it was short, else 0.
        first_dry: the first rank that got nothing in the last round, if any.
    """

    tail: Tail | None = None
    remainder: int = 0
    first_dry: int | None = None

    @classmethod
    def after(cls, portion: Portion | None) -> StreamEnd:
        """The end, given the last portion that was cut."""
        if portion is None:
            return cls()
        return cls(portion.tail if portion.tail.is_padded else None, portion.remainder, portion.first_dry)


@dataclass(frozen=True)
class Marked:
    """What a worker hands over at a time.

    Args:
        worker: its number.
        batches: one, or none beside an end.
        end: after the last batch.
    """

    worker: int
    batches: tuple[Any, ...]
    end: StreamEnd | None = None


def skipping_orders() -> Tensor:
    """What the loop tells workers of a pass: its number, and how many of each one's first batches nobody will see.

    In shared memory, so that persistent workers hear of it too.
    """
    orders: Tensor = torch.zeros(2, dtype=torch.int64).share_memory_()
    return orders


@dataclass
class MarkingCollate:
    """Collates samples in a worker, and takes the end from among them.

    Args:
        collate: the user's function. It is not called for batches that are skipped.
        full_size: samples of a batch, where a shorter one is left out; None where it is not.
        orders: see `skipping_orders`.
    """

    collate: Callable[[Any], Any]
    full_size: int | None
    orders: Tensor
    _pass: int = field(default=-1, init=False)
    _num_read: int = field(default=0, init=False)

    def __call__(self, items: Any) -> tuple[int, tuple[Any, ...], StreamEnd | None]:
        """The fields of a `Marked`, as a tuple, which torch's memory pinning knows how to enter."""
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if isinstance(items, StreamEnd):  # a loader with batch_size=None
            return worker, (), items
        if not (isinstance(items, list) and items and isinstance(items[-1], StreamEnd)):
            return worker, (self._batch(items),), None
        *samples, end = items
        is_left_out = not samples or (self.full_size is not None and len(samples) < self.full_size)
        return worker, () if is_left_out else (self._batch(samples),), end

    def _batch(self, items: Any) -> Any:
        number, num_skipped = self.orders.tolist()
        if number != self._pass:
            self._pass, self._num_read = number, 0
        self._num_read += 1
        return None if self._num_read <= num_skipped else self.collate(items)


@dataclass
class _Waiting:
    """A batch that was read ahead, and how much of it is real if it is padded."""

    batch: Any
    turn: int
    tail: Tail | None = None
    remainder: int = 0


class WorkerStreamFeed:
    """The batches of one rank that its workers cut, each handed out once the rest of its round is known.

    Torch asks workers in turn, so a worker's end comes at most `num_workers` turns after its last batch; where ranks
    may end unevenly, up to as many batches and as many ends may follow the last step of all ranks.

    Args:
        source: what torch's iterator reads.
        num_workers: at least 1.
        rank: this one.
        pads: whether short rounds are filled up, so that no rank ends before another.
        num_dropped: batches to read and drop first.
    """

    source_state: Any = None

    def __init__(self, source: Any, num_workers: int, rank: int, *, pads: bool, num_dropped: int) -> None:
        self._source = source
        self._num_workers = num_workers
        self._rank = rank
        self._num_ahead = num_workers if pads else 2 * num_workers
        self._num_dropped = num_dropped
        self._ends: list[StreamEnd] = []
        self._is_over = False  # all workers have said their last word
        self._failure: Exception | None = None  # raised once what was read before has been handed out
        self._waiting: deque[_Waiting] = deque()
        self._latest: dict[int, _Waiting] = {}  # the last batch of each worker
        self.total: int | None = None
        self.tail: Tail | None = None
        self.is_padding = False
        self.remainder = -1
        self.ragged: Ragged | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._source)

    def serve(self, batches: Iterator[Any]) -> Iterator[Any]:
        """`batches`, without their marks."""
        turns = enumerate(Marked(*marked) for marked in batches)
        served = -self._num_dropped
        while True:
            self._read_ahead(turns)
            if served >= 0:
                self._note_ragged(served)
            if not self._waiting:
                break
            waiting = self._waiting.popleft()
            served += 1
            if served <= 0:
                continue
            self.tail, self.is_padding = waiting.tail, waiting.tail is not None
            if self._is_over and not self._waiting and self._failure is None:
                self.total, self.remainder = served, waiting.remainder
            yield waiting.batch
        if self._failure is not None:
            raise self._failure
        self.total = max(served, 0)

    def _read_ahead(self, turns: Iterator[tuple[int, Marked]]) -> None:
        """Read until the batch that comes next has what has to be known of it."""
        while not self._is_over:
            try:
                turn, marked = next(turns)
            except StopIteration:  # an end alone is no batch where short ones are left out
                self._is_over = True
                return
            except Exception as error:  # noqa: BLE001  (raised when its turn comes)
                self._failure, self._is_over = error, True
                return
            for batch in marked.batches:
                waiting = _Waiting(batch, turn)
                self._waiting.append(waiting)
                self._latest[marked.worker] = waiting
            if marked.end is not None:
                self._note_end(marked.worker, marked.end)
            if self._waiting and turn - self._waiting[0].turn >= self._num_ahead:
                return

    def _note_end(self, worker: int, end: StreamEnd) -> None:
        self._ends.append(end)
        self._is_over = len(self._ends) == self._num_workers
        latest = self._latest.get(worker)
        if latest is not None and end.tail is not None:
            latest.tail, latest.remainder = end.tail, end.remainder

    def _note_ragged(self, served: int) -> None:
        """Once every worker has ended, note the step at which the first ranks get nothing."""
        if not self._is_over or self._failure is not None or self.ragged is not None:
            return
        first_dry = [end.first_dry for end in self._ends if end.first_dry is not None]
        if first_dry:
            own = sum(rank <= self._rank for rank in first_dry)
            common = served + len(self._waiting) - (len(first_dry) - own)
            self.ragged = Ragged(common, max(first_dry))
