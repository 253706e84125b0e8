"""How accel's ranks talk: one fixed-size slot per rank, then a message of bytes where the slot is too small.

A slot says which collective this is (its number, a digest of what is called, the text and the call site), so that
ranks that do not fit together all find out, at once, and can say how they differ. What is small travels in the slot
itself. Slots always go over the CPU (gloo) half of our own group: nothing waits for a device.

    offset   0  number of the collective (uint64)
             8  digest of what is called (16 bytes)
            24  length of the body (uint64)
            32  length of the head and of the text (2 x uint32), of the site, 1 when this rank failed (2 x uint16)
            48  text, then site
           512  head: numbers that every rank needs from every other (sizes); then, aligned, the body. If both fit
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not listed

from accel_state.collectives.callsite import call_site
from accel_state.collectives.layout import as_message, padding
from accel_state.errors import CollectiveMismatchError, ProcessGroupError

_HEADER = struct.Struct("<Q16sQIIHH")
_TEXT_AT = 48
_BODY_AT = 512
_SITE_LIMIT = 160
_TEXT_LIMIT = _BODY_AT - _TEXT_AT - _SITE_LIMIT
_SLICE = timedelta(seconds=1)  # a wait in slices lets Ctrl-C through
_GRACE_S = 3.0  # after a time-out, how long to wait for others to say that they came


@dataclass(frozen=True)
class Call:
    """A collective as the user made it: operation and data layout, equal on all ranks, and the call site."""

    text: str
    site: str


class Replies(NamedTuple):
    """What an exchange brought from every rank.

    heads: each rank's head.
    lengths: each rank's body's length in bytes.
    bodies: `[world_size, n]` uint8, one row per rank; valid until the next exchange.
    """

    heads: list[bytes]
    lengths: list[int]
    bodies: torch.Tensor


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
        self.pid = os.getpid()
        self._slot_bytes = 4096 if world_size <= 256 else 1024
        self._number = 0
        self._turns: dict[str, int] = {}
        self._broken: str | None = None
        self._sent = bytearray(self._slot_bytes)
        self._received = bytearray(self._slot_bytes * world_size)
        self._sent_slot = torch.frombuffer(self._sent, dtype=torch.uint8)
        self._matrix = torch.frombuffer(self._received, dtype=torch.uint8).view(world_size, self._slot_bytes)
        self._slots = list(self._matrix)

    def next_turn(self, name: str) -> int:
        """A number that grows with each use of `name` on this rank, for keys in the store."""
        self._turns[name] = self._turns.get(name, 0) + 1
        return self._turns[name]

    # ---- slots

    def begin(self, text: str) -> Call:
        """Number a new collective.

        Args:
            text: operation and layout of the data; has to be the same on all ranks.

        Raises:
            ProcessGroupError: the group is unusable since an earlier time-out, or this is a forked process.
        """
        if self._broken is not None:
            raise ProcessGroupError(
                f"the process group is unusable since {self._broken}. End this process, or call "
                "destroy_process_group() on every rank to start anew"
            )
        if os.getpid() != self.pid:
            raise ProcessGroupError(
                f"{text.partition(' ')[0]} was called in a forked process (say, a data loader's worker): only the "
                "process that made the group can talk to the other ranks"
            )
        self._number += 1
        return Call(text, call_site())

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
            body: flat uint8 tensors on the CPU; each begins at an aligned offset.
            source: the only rank whose body matters.

        Raises:
            CollectiveMismatchError: the ranks called different things, or some did not come.

        Cost: one all-gather of 4 KiB per rank; where a rank's head and body do not fit into that, a message too.
        """
        length = sum(part.numel() + padding(part.numel()) for part in body)
        self._write_header(call, len(head), length)
        at = _BODY_AT + len(head) + padding(len(head))
        if self.fits(len(head), length):
            self._sent[_BODY_AT : _BODY_AT + len(head)] = head
            for part in body:
                num_bytes = part.numel()
                self._sent_slot[at : at + num_bytes].copy_(part)
                at += num_bytes + padding(num_bytes)
        lengths = self._swap_slots(call)
        longest = max(lengths)
        if not self.fits(len(head), longest):
            return self._swap_message(call, head, body, lengths, source)
        heads = [bytes(self._received[at : at + len(head)]) for at in self._slot_offsets(_BODY_AT)] if head else []
        body_at = _BODY_AT + len(head) + padding(len(head))
        return Replies(heads, lengths, self._matrix[:, body_at : body_at + longest])

    def report_failure(self, operation: str, error: Exception) -> None:
        """Tell the other ranks that this one cannot take part in the collective that they are in."""
        call = self.begin(operation)
        failed = Call(f"{operation} failed there with {type(error).__name__}: {error}", call.site)
        self._write_header(failed, 0, 0, failed=True)
        self._wait(self.group.allgather([self._slots], [self._sent_slot]), call)
        self._swap_texts(failed)

    def _slot_offsets(self, offset: int) -> range:
        """Where `offset` of each slot lies in what was received."""
        return range(offset, len(self._received), self._slot_bytes)

    def _write_header(self, call: Call, head_length: int, length: int, failed: bool = False) -> None:
        text, site = call.text.encode(), call.site.encode()[-_SITE_LIMIT:]
        digest = hashlib.blake2b(text, digest_size=16).digest()
        _HEADER.pack_into(self._sent, 0, self._number, digest, length, head_length, len(text), len(site), failed)
        said = text[:_TEXT_LIMIT] + site
        self._sent[_TEXT_AT : _TEXT_AT + len(said)] = said

    def _swap_slots(self, call: Call) -> list[int]:
        """Send ours, receive all; returns the lengths of the bodies."""
        self._wait(self.group.allgather([self._slots], [self._sent_slot]), call)
        mine = bytes(self._sent[:24])
        lengths = []
        for at in self._slot_offsets(0):
            header = _HEADER.unpack_from(self._received, at)
            if header[6] or self._received[at : at + 24] != mine:
                self._raise_mismatch(call)
            lengths.append(header[2])
        return lengths

    def _swap_message(
        self, call: Call, head: bytes, body: Sequence[torch.Tensor], lengths: list[int], source: int | None
    ) -> Replies:
        parts = [_bytes_tensor(head), *body] if head else list(body)
        head_bytes = len(head) + padding(len(head))
        mine = as_message(parts, head_bytes + max(lengths))
        if source is None:
            everyone = self.all_gather_bytes(mine, call)
        else:
            self.broadcast_bytes(mine, source, call)
            everyone = mine.expand(self.world_size, -1)
        heads = [_to_bytes(row[: len(head)]) for row in everyone] if head else []
        return Replies(heads, lengths, everyone[:, head_bytes:])

    # ---- messages

    def all_gather_bytes(self, mine: torch.Tensor, call: Call) -> torch.Tensor:
        """All ranks' bytes, `[world_size, n]`; `mine` is flat uint8 of one length everywhere, on any device."""
        everyone = mine.new_empty(self.world_size, mine.numel())
        self._wait(self.group.allgather([list(everyone)], [mine]), call, mine.device.type)
        return everyone

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
        replies = self.exchange(self.begin(text), body=[_dump(value)])
        return [_load(body) for body in replies.bodies]

    def broadcast_object(self, text: str, value: Any, source: int) -> Any:
        """The value of `source` on every rank; pickled on the way."""
        body = [_dump(value)] if self.rank == source else []
        return _load(self.exchange(self.begin(text), body=body, source=source).bodies[source])

    # ---- what goes wrong

    def _wait(self, work: Any, call: Call, device: str = "cpu") -> None:
        if device != "cpu":  # only makes the device's stream wait; a wait with a limit would hold up this process
            work.wait()
            return
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            try:
                work.wait(min(_SLICE, self.timeout))
                return
            except RuntimeError as error:
                if work.is_completed() or time.monotonic() >= deadline:
                    self._raise_absent(call, error)

    def _raise_mismatch(self, call: Call) -> NoReturn:
        said = [f"{text}  at {site}" for text, site in zip(self._swap_texts(call), self._sites(), strict=True)]
        lines = "\n".join(f"  {_ranks(ranks)}: {text}" for text, ranks in _grouped(said).items())
        raise CollectiveMismatchError(
            f"the ranks did not make the same call (collective number {self._number}):\n{lines}\n"
            "Every rank has to make the same collective calls in the same order, with data of one layout"
        )

    def _swap_texts(self, call: Call) -> list[str]:
        """What each rank called. All ranks come here when slots differ, so those too long for a slot can follow."""
        lengths = [_HEADER.unpack_from(self._received, at)[4] for at in self._slot_offsets(0)]
        longest = max(lengths)
        if longest <= _TEXT_LIMIT:
            starts = self._slot_offsets(_TEXT_AT)
            return [self._received[at : at + n].decode(errors="replace") for at, n in zip(starts, lengths, strict=True)]
        mine = as_message([_bytes_tensor(call.text.encode())], longest + padding(longest))
        rows = self.all_gather_bytes(mine, call)
        return _shortened([_to_bytes(row[:n]).decode(errors="replace") for row, n in zip(rows, lengths, strict=True)])

    def _sites(self) -> list[str]:
        sites = []
        for at in self._slot_offsets(0):
            *_, text_length, site_length, _ = _HEADER.unpack_from(self._received, at)
            start = at + _TEXT_AT + min(text_length, _TEXT_LIMIT)
            sites.append(self._received[start : start + site_length].decode(errors="replace"))
        return sites

    def _raise_absent(self, call: Call, error: RuntimeError) -> NoReturn:
        """Find out through the store who came, and say who did not."""
        self._broken = f"{call.text} at {call.site} did not end"
        try:
            came = self._roll_call(call)
        except RuntimeError as lost:
            raise CollectiveMismatchError(
                f"rank {self.rank} waited in {call.text} at {call.site}, and the store of the job (on rank 0, or with "
                f"the launcher) is gone: {lost}"
            ) from error
        absent = [rank for rank in range(self.world_size) if rank not in came]
        limit_s = self.timeout.total_seconds()
        who = f"{_ranks(absent)} never came" if absent else f"all ranks came, but it did not end within {limit_s:g} s"
        raise CollectiveMismatchError(
            f"collective number {self._number}, {call.text} at {call.site}: {who}. "
            f"{_ranks(sorted(came))} waited (time-out {limit_s:g} s). A rank that is missing has ended, hangs, or took "
            f"another branch. What gloo said: {error}"
        ) from error

    def _roll_call(self, call: Call) -> set[int]:
        prefix = f"late/{self._number}"
        self.store.set(f"{prefix}/{self.rank}", f"{call.text} at {call.site}")
        keys = [f"{prefix}/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + _GRACE_S
        while not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)
        return {rank for rank, key in enumerate(keys) if self.store.check([key])}

    def goodbye(self) -> Callable[[float], None]:
        """What to call with a limit in seconds when this process ends, after its groups are gone.

        Ranks that may still read the store keep its host (rank 0) until they have said goodbye too.
        """
        store, rank, is_host = self.store, self.rank, self.rank == 0 and self._broken is None
        keys = [f"bye/{other}" for other in range(self.world_size)]

        def say(limit_s: float) -> None:
            with suppress(RuntimeError):  # the host is gone, or a rank died without a word: nobody waits for it
                store.set(keys[rank], "")
                if is_host:
                    store.wait(keys, timedelta(seconds=limit_s))

        return say


def _dump(value: Any) -> torch.Tensor:
    return _bytes_tensor(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def _load(body: torch.Tensor) -> Any:
    return pickle.loads(_to_bytes(body))  # noqa: S301  (from a rank of our own job)


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(body: torch.Tensor) -> bytes:
    return ctypes.string_at(body.data_ptr(), body.numel())


def _shortened(texts: Sequence[str]) -> list[str]:
    """Long texts, from a little before where they begin to differ."""
    common = next((at for at, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), 0)
    start = max(common - 100, 0)
    return [("..." if start else "") + text[start : common + 100] + "..." for text in texts]


def _grouped(said: Sequence[str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(said):
        groups.setdefault(text, []).append(rank)
    return groups


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
