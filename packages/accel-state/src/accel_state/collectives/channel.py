"""How accel's ranks talk: one fixed-size slot per rank, then a message of bytes where the slot is too small.

A slot says which collective this is (its number and a digest of what is called), so that ranks that do not fit
together all find out, at once; they then tell each other what they called, and where. What is small travels in the slot
itself. Slots always go over the CPU (gloo) half of our own group: nothing waits for a device.

    offset   0  number of the collective (uint64)
             8  digest of what is called (16 bytes)
            24  length of the body, length of the head, 1 when this rank failed (3 x uint64)
            48  head: numbers that every rank needs from every other (sizes); then, aligned, the body. If both fit
"""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not listed

from accel_state.collectives import absence
from accel_state.collectives.call import Call, GoingFirst, Replies
from accel_state.collectives.messages import bytes_tensor, digest, dump, grouped, load, shortened, to_bytes
from accel_state.collectives.packing import ALIGNMENT, as_message, padded_bytes, padding, write
from accel_state.errors import CollectiveMismatchError, ProcessGroupError
from accel_state.forking import guard_forks
from accel_state.polling import until

_HEADER = struct.Struct("<Q16sQQQ")
_BODY_AT = _HEADER.size
_SLICE = timedelta(seconds=1)  # a wait in slices lets Ctrl-C through


_CHANNELS: weakref.WeakSet[Channel] = weakref.WeakSet()


def _mark_copies() -> None:
    for channel in _CHANNELS:
        channel._is_copy = True  # noqa: SLF001


os.register_at_fork(after_in_child=_mark_copies)  # asking for the process's number in each collective would cost more
guard_forks()


class Channel:
    """Our own process group, and the store beside it.

    Args:
        group: a group of all ranks with a CPU half.
        store: of the job, with a prefix of our own.
        rank: of this process.
        world_size: how many there are.
        timeout: of each collective.
    """

    def __init__(self, group: dist.ProcessGroup, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self.group = group
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._is_copy = False
        _CHANNELS.add(self)
        self._slot_bytes = 8192 if world_size <= 64 else 1024
        self._lock = threading.Lock()  # one collective at a time, whichever thread calls it
        self._wait_slice = min(_SLICE, timeout)
        self._number = 0
        self._turns: dict[str, int] = {}
        self.going_first: GoingFirst | None = None
        self._broken: str | None = None
        # of slots; kept until the next, so that gloo's thread, never the last to let go, needs no lock of Python's
        self._latest_work: Any = None
        self._sent = bytearray(self._slot_bytes)
        self._received = bytearray(self._slot_bytes * world_size)
        self._sent_slot = torch.frombuffer(self._sent, dtype=torch.uint8)
        self._matrix = torch.frombuffer(self._received, dtype=torch.uint8).view(world_size, self._slot_bytes)
        self._starts = self._slot_offsets(0)
        self._slots_argument = [list(self._matrix)]
        self._sent_argument = [self._sent_slot]
        self._sent_address = self._sent_slot.data_ptr()

    @property
    def is_copy(self) -> bool:
        """Whether this is a forked process's copy, which cannot talk to anybody."""
        return self._is_copy

    def next_turn(self, name: str) -> int:
        """A number that grows with each use of `name` on this rank, for keys in the store."""
        self._turns[name] = self._turns.get(name, 0) + 1
        return self._turns[name]

    # ---- slots

    def begin(self, text: str) -> Call:
        """Number a new collective.

        Args:
            text: operation and layout of the data; has to be the same on all ranks.

        Returns:
            the call, which holds the channel: use it as `with channel.begin(text) as call`. Other threads wait.

        Raises:
            ProcessGroupError: the group is unusable since an earlier time-out, this is a forked process, or the others
                wait for this rank elsewhere.
        """
        if self._broken is not None:
            raise ProcessGroupError(
                f"the process group is unusable since {self._broken}. End this process, or call "
                "destroy_process_group() on every rank to start anew"
            )
        if self._is_copy:
            raise ProcessGroupError(
                f"{text.partition(' ')[0]} was called in a forked process (say, a data loader's worker): only the "
                "process that made the group can talk to the other ranks"
            )
        if self.going_first is not None:
            self.going_first.refuse(text, self.rank)
        self._lock.acquire()
        self._number += 1
        return Call(text, self._lock)

    def fits(self, head_bytes: int, body_bytes: int) -> bool:
        """Whether a head and a body fit into a slot."""
        return _BODY_AT + head_bytes + padding(head_bytes) + body_bytes <= self._slot_bytes

    def exchange(
        self, call: Call, head: bytes = b"", body: Sequence[torch.Tensor] = (), source: int | None = None
    ) -> Replies:
        """Every rank's head and body; all ranks find out together if they do not call the same.

        Args:
            call: from `begin`.
            head: of one length on all ranks.
            body: tensors on the CPU whose bytes lie in order; each begins at an aligned offset.
            source: the only rank whose body matters.

        Raises:
            CollectiveMismatchError: the ranks called different things, or some did not come.

        Cost: one all-gather of 8 KiB per rank (1 KiB where there are more than 64); where a rank's head and body do not
            fit into that, a message too.
        """
        length = padded_bytes(body)
        self._write_header(call, len(head), length)
        body_at = _BODY_AT + len(head) + -len(head) % ALIGNMENT
        if body_at + length <= self._slot_bytes:
            self._sent[_BODY_AT : _BODY_AT + len(head)] = head
            write(body, self._sent_address + body_at)
        lengths = self._swap_slots(call, length)
        longest = max(lengths)
        if body_at + longest > self._slot_bytes:
            return self._swap_message(call, head, body, lengths, source)
        heads = [bytes(self._received[at : at + len(head)]) for at in self._slot_offsets(_BODY_AT)] if head else []
        return Replies(heads, lengths, self._matrix[:, body_at : body_at + longest] if longest else self._matrix)

    @contextmanager
    def told_to_others(self, operation: str) -> Iterator[None]:
        """What fails in the block, in which nothing is sent yet, the other ranks are told, rather than left to wait."""
        try:
            yield
        except Exception as error:
            self.report_failure(operation, error)
            raise

    def report_failure(self, operation: str, error: Exception) -> None:
        """Tell the other ranks that this one cannot take part in the collective that they are in."""
        with self.begin(f"{operation} failed there with {type(error).__name__}: {error}") as call:
            self._write_header(call, 0, 0, failed=True)
            self._wait(self.group.allgather(self._slots_argument, self._sent_argument), call)
            self._swap_texts(call)

    def _slot_offsets(self, offset: int) -> range:
        """Where `offset` of each slot lies in what was received."""
        return range(offset, len(self._received), self._slot_bytes)

    def _write_header(self, call: Call, head_length: int, length: int, failed: bool = False) -> None:
        _HEADER.pack_into(self._sent, 0, self._number, digest(call.text), length, head_length, failed)

    def _swap_slots(self, call: Call, length: int) -> list[int]:
        """Send ours, receive all; returns the lengths of the bodies."""
        self._latest_work = self.group.allgather(self._slots_argument, self._sent_argument)
        self._wait(self._latest_work, call)
        mine, received = self._sent[:_BODY_AT], self._received
        for at in self._starts:
            if received[at : at + _BODY_AT] != mine:
                break
        else:  # most calls
            return [length] * self.world_size
        headers = [_HEADER.unpack_from(received, at) for at in self._starts]
        if any(header[4] or (*header[:2], header[3]) != (*headers[0][:2], headers[0][3]) for header in headers):
            self._raise_mismatch(call)
        return [header[2] for header in headers]

    def _swap_message(
        self, call: Call, head: bytes, body: Sequence[torch.Tensor], lengths: list[int], source: int | None
    ) -> Replies:
        parts = [bytes_tensor(head), *body] if head else list(body)
        head_bytes = len(head) + padding(len(head))
        mine = as_message(parts, head_bytes + max(lengths))
        if source is None:
            everyone = self.all_gather_bytes(mine, call)
        else:
            self.broadcast_bytes(mine, source, call)
            everyone = mine.expand(self.world_size, -1)
        heads = [to_bytes(row[: len(head)]) for row in everyone] if head else []
        return Replies(heads, lengths, everyone[:, head_bytes:])

    # ---- messages

    def all_gather_bytes(self, mine: torch.Tensor, call: Call) -> torch.Tensor:
        """All ranks' bytes, `[world_size, n]`; `mine` is flat uint8 of one length everywhere, on any device."""
        everyone = mine.new_empty(self.world_size * mine.numel())
        self.all_gather_into(everyone, mine, call)
        return everyone.view(self.world_size, mine.numel())

    def all_gather_into(self, everyone: torch.Tensor, mine: torch.Tensor, call: Call) -> None:
        """Gather contiguous tensors of one shape into one that is longer by the number of ranks; bytes or numbers."""
        if mine.numel():
            parts = list(everyone.chunk(self.world_size))
            self._wait(self.group.allgather([parts], [mine]), call, mine.device.type)

    def broadcast_bytes(self, data: torch.Tensor, source: int, call: Call) -> None:
        """Overwrite `data` (flat uint8, any device) with that of `source`."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._wait(self.group.broadcast([data], options), call, data.device.type)

    def all_reduce(self, data: torch.Tensor, operation: Any, call: Call) -> None:
        """Reduce `data` in place over all ranks, on any device."""
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        self._wait(self.group.allreduce([data], options), call, data.device.type)

    # ---- objects

    def exchange_objects(self, text: str, value: Any) -> list[Any]:
        """Every rank's value, pickled on the way (as torch's own object collectives do, inside one job)."""
        body = [self._dumped(text, value)]
        with self.begin(text) as call:
            return [load(row) for row in self.exchange(call, body=body).bodies]

    def broadcast_object(self, text: str, value: Any, source: int) -> Any:
        """The value of `source` on every rank; pickled on the way."""
        body = [self._dumped(text, value)] if self.rank == source else []
        with self.begin(text) as call:
            return load(self.exchange(call, body=body, source=source).bodies[source])

    def _dumped(self, text: str, value: Any) -> torch.Tensor:
        with self.told_to_others(text):
            return dump(value)

    # ---- what goes wrong

    def _wait(self, work: Any, call: Call, device: str = "cpu") -> None:
        if device != "cpu":  # only makes the device's stream wait; a wait with a limit would hold up this process
            work.wait()
            return
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            try:
                work.wait(self._wait_slice)
                return
            except RuntimeError as error:
                if work.is_completed() and not absence.is_lost_connection(error):
                    self._raise_failed(call, error)
                if work.is_completed() or time.monotonic() >= deadline:
                    self._raise_absent(call, error)

    def _raise_mismatch(self, call: Call) -> NoReturn:
        said = self._swap_texts(call)
        lines = "\n".join(f"  {absence.ranks_text(ranks)}: {text}" for text, ranks in grouped(said).items())
        raise CollectiveMismatchError(
            f"the ranks did not make the same call (collective number {self._number}):\n{lines}\n"
            "Every rank has to make the same collective calls in the same order, with data of one layout"
        )

    def _swap_texts(self, call: Call) -> list[str]:
        """What each rank called, and where. All ranks come here when their slots differ."""
        mine = [dump((call.text, call.site))]
        length = torch.tensor([padded_bytes(mine)])
        lengths = self.all_gather_bytes(length.view(torch.uint8), call).view(torch.int64)
        rows = self.all_gather_bytes(as_message(mine, int(lengths.max())), call)
        texts, sites = zip(*map(load, rows), strict=True)
        return [f"{text}  at {site}" for text, site in zip(shortened(texts), sites, strict=True)]

    def _raise_absent(self, call: Call, error: RuntimeError) -> NoReturn:
        self._broken = f"{call.text} at {call.site} did not end"
        absence.raise_absent(
            self.store,
            self.rank,
            self.world_size,
            number=self._number,
            text=call.text,
            limit_s=self.timeout.total_seconds(),
            error=error,
        )

    def _raise_failed(self, call: Call, error: RuntimeError) -> NoReturn:
        """All ranks may be here: what failed is the work itself, as for a type of numbers that the backend lacks."""
        self._broken = f"{call.text} at {call.site} failed"
        self.post_failure(error)
        raise ProcessGroupError(
            f"collective number {self._number}, {call.text} at {call.site}, failed on rank {self.rank}: {error}"
        ) from error

    def post_failure(self, error: BaseException) -> None:
        """Tell ranks that wait for this one why it is about to end."""
        with suppress(RuntimeError):  # the store is gone: nobody is left to be told
            absence.post_failure(self.store, self.rank, error)

    def note_connected(self) -> None:
        """Tell the others that this rank's connections stand."""
        self.store.add("connected", 1)

    def wait_until_connected(self, limit_s: float) -> None:
        """Return when all ranks' connections stand, or after `limit_s`: one that leaves earlier would break theirs."""
        if self._broken is None and not self._is_copy:
            with suppress(RuntimeError):  # the store is gone, and with it those that could wait
                until(lambda: self.store.add("connected", 0) >= self.world_size, limit_s)

    def goodbye(self) -> Callable[[float], None]:
        """What to call with a limit in seconds when this process ends, after its groups are gone.

        Ranks that may still read the store keep its host (rank 0) until they have said goodbye too.
        """
        store, rank, is_host = self.store, self.rank, self.rank == 0 and self._broken is None
        keys = [f"bye/{other}" for other in range(self.world_size)]

        def say(limit_s: float) -> None:
            with suppress(RuntimeError):  # the host is gone: nobody waits for this rank
                store.set(keys[rank], "")
                if is_host:
                    until(lambda: store.check(keys), limit_s)

        return say
