"""A stream that workers cut for the ranks: how its end in each worker becomes known to the loop.

Each worker reads a stream of its own and cuts it for all ranks, so only it sees that a round is short. It says so after
its last sample, on the way of the samples through the collate function; the loop reads far enough ahead to hear it
before it hands out the batches concerned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class MarkingCollate:
    """Collates samples in a worker, and takes the end from among them."""

    collate: Callable[[Any], Any]

    def __call__(self, items: Any) -> tuple[int, tuple[Any, ...], StreamEnd | None]:
        """The fields of a `Marked`, as a tuple, which torch's memory pinning knows how to enter."""
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if isinstance(items, StreamEnd):  # a loader with batch_size=None
            return worker, (), items
        if not (isinstance(items, list) and items and isinstance(items[-1], StreamEnd)):
            return worker, (self.collate(items),), None
        *samples, end = items
        return worker, (self.collate(samples),) if samples else (), end


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
            if self._has_ended and not self._waiting:
                self.total, self.remainder = served, waiting.remainder
            yield waiting.batch
        self.total = max(served, 0)

    @property
    def _has_ended(self) -> bool:
        return len(self._ends) == self._num_workers

    def _read_ahead(self, turns: Iterator[tuple[int, Marked]]) -> None:
        """Read until the batch that comes next has what has to be known of it."""
        while not self._has_ended:
            turn, marked = next(turns)
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
        latest = self._latest.get(worker)
        if latest is not None and end.tail is not None:
            latest.tail, latest.remainder = end.tail, end.remainder

    def _note_ragged(self, served: int) -> None:
        """Once every worker has ended, note the step at which the first ranks get nothing."""
        if not self._has_ended or self.ragged is not None:
            return
        first_dry = [end.first_dry for end in self._ends if end.first_dry is not None]
        if first_dry:
            own = sum(rank <= self._rank for rank in first_dry)
            common = served + len(self._waiting) - (len(first_dry) - own)
            self.ragged = Ragged(common, max(first_dry))
