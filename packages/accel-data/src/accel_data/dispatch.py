"""`DataLoaderDispatcher`: rank 0 reads, and sends each rank its part."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from accel_state.errors import CollectiveMismatchError, DataLoaderError

from .feeds import Feed, Ragged, Tail, name_samples
from .loader import DataLoaderShard
from .position import Pass, Position
from .rounds import Cutter, Round, rounds_of
from .wire import BATCH, END, FAILURE, Note, Wire, decode, encode, job_timeout

READER = 0  # the rank that reads
_GOODBYE = timedelta(seconds=10)  # how long a reader that leaves waits for others to take their last batch


class DataLoaderDispatcher(DataLoaderShard):
    """A loader that only rank 0 reads; the others are sent their part of each round, and nothing else.

    Whole batches go to ranks as they are, of any shape and with any items that can be pickled. A last round with fewer
    batches than ranks is completed with the first batches (`even_batches`), left out (`_drop_last`), or ends earlier on
    some ranks. Under `split_batches`, and where a `slice_fn` is given, one batch is cut instead.

    Args:
        dataset, skip_batches, use_stateful_dataloader, _non_blocking, torch_device_mesh, iteration: as in
            `DataLoaderShard`.
        split_batches: each batch is cut into one part per rank, instead of every rank getting a batch of its own.
        _drop_last: leave out a last round that has fewer batches than ranks.
        slice_fn: cuts a batch: `slice_fn(batch, slice, process_index=..., num_processes=...)`. Given without
            `split_batches`, the batches of a round are joined for it.
        even_batches: complete the last round.
        part_of_rank: for each rank, which part it gets; ranks with the same number get the same batches. By default
            each its own.
        **kwargs: those of `DataLoaderShard` and `torch.utils.data.DataLoader`.

    Raises:
        DataLoaderError: there is no process group for several ranks, or `part_of_rank` does not fit it.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        *,
        even_batches: bool = True,
        part_of_rank: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
            **kwargs,
        )
        self.rank, world_size = _place_in_group()
        self.part_of_rank = list(range(world_size)) if part_of_rank is None else list(part_of_rank)
        if len(self.part_of_rank) != world_size:
            raise DataLoaderError(
                f"Batches can only be dispatched within the process group: it has {world_size} ranks, and parts are "
                f"given for {len(self.part_of_rank)}. Leave num_processes out, or use dispatch_batches=False."
            )
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.slice_fn = slice_fn
        self._drops_short_round = _drop_last
        self._wire: Wire | None = None
        self._pass_number = 0

    # ---- what a step is

    @property
    def _num_parts(self) -> int:
        return max(self.part_of_rank) + 1

    @property
    def _num_readers(self) -> int:
        return len(self.part_of_rank)

    @property
    def _batches_per_round(self) -> int:
        return 1 if self.split_batches else self._num_parts

    @property
    def _units_per_step(self) -> int:
        return self._shard.units_per_step * self._batches_per_round

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all ranks together take in one step; None where the loader does not tell."""
        size = self._shard.total_batch_size
        return None if size is None else size * self._batches_per_round

    @property
    def rank_batch_size(self) -> int | None:
        """Samples that this rank takes in one step, but for the last; None where the loader does not tell."""
        size = self.total_batch_size
        return None if size is None else size // self._num_parts

    def __len__(self) -> int:
        """This rank's batches in a whole epoch, less those skipped at its start."""
        rounds, rest = divmod(len(self._shard), self._batches_per_round)
        mine = self.part_of_rank[self.rank]
        rounds += rest > 0 and not self._drops_short_round and (self.even_batches or mine < rest)
        return max(rounds - self.skip_batches, 0)

    # ---- iterating

    def _start(self) -> Pass:
        """As in every loader; where it fails on the rank that reads, the others hear of it instead of waiting."""
        if self._wire is None and len(self.part_of_rank) > 1:
            self._wire = Wire(job_timeout())
        self._pass_number += 1
        try:
            try:
                position = self._arrive()
            finally:
                self._synchronize()  # also after a failure: the others are there
            return self._opened(position)
        except CollectiveMismatchError:
            raise
        except Exception as error:
            self._tell_failure(error, 0)
            raise

    def _open(self, origin: Position) -> Feed:
        return _Rounds(super()._open(origin) if self.rank == READER else None)

    def _batches(self, feed: Any) -> Iterator[Any]:
        """Cost per step: one message to each other rank, of its part and 64 bytes."""
        batches = self._read_and_send(feed) if self.rank == READER else self._receive(feed)
        return self._placed(batches)

    def _receive(self, feed: _Rounds) -> Iterator[Any]:
        assert self._wire is not None  # only rank 0 can be alone
        step, is_last = 0, False
        while not is_last:
            note, payload = self._wire.receive(READER, self._pass_number, step)
            if note.kind == FAILURE:
                raise DataLoaderError(f"Rank {READER}, which reads for all ranks, failed: {decode(payload)}")
            feed.take(note)
            if note.kind == END:
                return
            is_last = bool(note.is_last)
            yield decode(payload)
            step += 1

    def _read_and_send(self, feed: _Rounds) -> Iterator[Any]:
        assert feed.inner is not None
        own_part = self.part_of_rank[READER]
        cutter = Cutter(self._num_parts, self.split_batches, self.even_batches, self.slice_fn, own_part)
        step = 0
        try:
            batches = feed.remembering(feed.inner.serve(self._torch_iterator(feed.inner)))
            for group, is_last in rounds_of(batches, feed.inner, self._batches_per_round, self._drops_short_round):
                dealt = cutter.deal(group, is_last)
                note = self._send(dealt, step)
                own = dealt.parts[own_part]
                if own is None:
                    return
                feed.take(replace(note, size=own.size, real=own.real), len(group))
                yield own.batch
                step += 1
            if feed.total is None:  # nothing was read at all
                self._send(cutter.nothing(), step)
        except GeneratorExit:  # the loop was left: the others still need the batch that they are about to ask for
            if self._wire is not None:
                self._wire.flush(_GOODBYE)
            raise
        except CollectiveMismatchError:
            raise
        except Exception as error:
            self._tell_failure(error, step)
            raise
        if self._wire is not None:
            self._wire.flush()

    def _send(self, dealt: Round, step: int) -> Note:
        """Each rank its part; one that several ranks get is encoded once, and nothing is sent before all is encoded."""
        note = Note(
            self._pass_number,
            step,
            BATCH,
            is_last=dealt.is_last,
            remainder=dealt.remainder,
            is_padded=dealt.is_padded,
            first_dry=dealt.first_dry,
        )
        if self._wire is None:
            return note
        wanted = {index for rank, index in enumerate(self.part_of_rank) if rank != READER}
        encoded = {index: encode(part.batch) for index, part in enumerate(dealt.parts) if part and index in wanted}
        self._wire.flush()
        for rank, index in enumerate(self.part_of_rank):
            part = dealt.parts[index]
            if rank == READER:
                continue
            if part is None:
                self._wire.send(rank, replace(note, kind=END), None)
            else:
                message = replace(note, size=part.size, real=part.real, num_bytes=encoded[index].numel())
                self._wire.send(rank, message, encoded[index])
        return note

    def _tell_failure(self, error: Exception, step: int) -> None:
        """Let the other ranks fail too, instead of waiting for a batch."""
        if self._wire is None or self.rank != READER:
            return
        payload = encode("; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
        note = Note(self._pass_number, step, FAILURE, num_bytes=payload.numel())
        for rank in range(len(self.part_of_rank)):
            if rank != READER:
                self._wire.send(rank, note, payload)
        self._wire.flush()

    def _leave(self, position: Position) -> None:
        if self.rank == READER:
            super()._leave(position)
        else:
            self._cursor.epoch = position.epoch + 1

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_wire": None}


@dataclass
class _Rounds:
    """The feed of a dispatched pass: every rank learns with each round what it has to know of the end.

    Args:
        inner: what rank 0 reads.

    Attributes:
        source_state: where rank 0 reads a data set that tells its state: that after the round handed out last.
    """

    inner: Feed | None
    total: int | None = None
    tail: Tail | None = None
    remainder: int = -1
    ragged: Ragged | None = None
    is_padding = False
    source_state: Any = None
    _states: deque[Any] = field(default_factory=deque)  # of batches that were read, until their round is handed out

    def __post_init__(self) -> None:
        self.source_state = getattr(self.inner, "source_state", None)

    def remembering(self, batches: Iterator[Any]) -> Iterator[Any]:
        """`batches` of the inner feed, whose state after each is kept."""
        num_read = 0
        try:
            for batch in batches:
                self._states.append(getattr(self.inner, "source_state", None))
                num_read += 1
                yield batch
        except Exception as error:
            assert self.inner is not None  # only rank 0 reads
            name_samples(error, self.inner, num_read)
            raise

    def take(self, note: Note, num_batches: int = 0) -> None:
        """Note what is told about the round that is handed out now, and the state after its batches."""
        for _ in range(num_batches):
            self.source_state = self._states.popleft()
        if note.first_dry:
            self.ragged = Ragged(note.step, note.first_dry)
        if note.is_last and note.kind == BATCH:
            self.total, self.remainder = note.step + 1, note.remainder
            self.tail = Tail(note.size, note.real, bool(note.is_padded))

    def __iter__(self) -> Iterator[Any]:
        raise DataLoaderError("The batches of a dispatched loader come from rank 0; it has no indices of its own.")

    def serve(self, batches: Iterator[Any]) -> Iterator[Any]:
        """`batches`, as they come."""
        return batches


def _place_in_group() -> tuple[int, int]:
    """This rank and the world size of torch's process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
