"""How accel's ranks talk: one fixed-size slot per rank, then a message of bytes where the slot is too small.

A slot says which collective this is (its number, a digest of what is called, the text and the call site), so that
ranks that do not fit together all find out, at once, and can say how they differ. What is small travels in the slot
itself. Slots always go over the CPU (gloo) half of our own group: nothing waits for a device.

    offset   0  number of the collective (uint64)
             8  digest of what is called (16 bytes)
            24  length of the body (uint64)
            32  length of the text, length of the site, 1 when this rank failed (3 x uint16)
            48  text, then site
           512  body, if it fits
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not listed

from accel_state.collectives.callsite import call_site
from accel_state.errors import CollectiveMismatchError, ProcessGroupError

_HEADER = struct.Struct("<Q16sQHHH")
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
        slot_bytes = 4096 if world_size <= 256 else 1024
        self.capacity = slot_bytes - _BODY_AT
        self._number = 0
        self._turns: dict[str, int] = {}
        self._broken: str | None = None
        self._sent = bytearray(slot_bytes)
        self._received = bytearray(slot_bytes * world_size)
        self._sent_slot = torch.frombuffer(self._sent, dtype=torch.uint8)
        self._slots = list(torch.frombuffer(self._received, dtype=torch.uint8).split(slot_bytes))
        self._views = [memoryview(self._received)[r * slot_bytes : (r + 1) * slot_bytes] for r in range(world_size)]

    def next_turn(self, name: str) -> int:
        """A number that grows with each use of `name` on this rank, for keys in the store."""
        self._turns[name] = self._turns.get(name, 0) + 1
        return self._turns[name]

    # ---- slots

    def exchange(self, text: str, body: Sequence[torch.Tensor] = (), source: int | None = None) -> list[torch.Tensor]:
        """Every rank's body; all ranks find out together if they do not call the same.

        Args:
            text: operation and layout of the data; has to be the same on all ranks.
            body: flat uint8 tensors on the CPU, sent one after the other.
            source: the only rank whose body matters; the others' are not sent.

        Returns:
            one flat uint8 tensor per rank, valid until the next exchange (16-byte aligned).

        Raises:
            CollectiveMismatchError: the ranks called different things, or some did not come.
            ProcessGroupError: the group is unusable since an earlier time-out, or this is a forked process.

        Cost: one all-gather of 4 KiB per rank; a body beyond 3.5 KiB costs a second one, padded to the longest.
        """
        call = self._begin(text)
        length = sum(part.numel() for part in body)
        self._write_header(call, length, failed=False)
        if length <= self.capacity:
            at = _BODY_AT
            for part in body:
                self._sent_slot[at : at + part.numel()].copy_(part)
                at += part.numel()
        lengths = self._swap_slots(call)
        if max(lengths) <= self.capacity:
            return [slot[_BODY_AT : _BODY_AT + n] for slot, n in zip(self._slots, lengths, strict=True)]
        return self._swap_long(call, body, lengths, source)

    def report_failure(self, operation: str, error: Exception) -> None:
        """Tell the other ranks that this one cannot take part in the collective that they are in."""
        call = self._begin(operation)
        failed = Call(f"{operation} failed there with {type(error).__name__}: {error}", call.site)
        self._write_header(failed, 0, failed=True)
        self._wait(self.group.allgather([self._slots], [self._sent_slot]), call)

    def _begin(self, text: str) -> Call:
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

    def _write_header(self, call: Call, length: int, failed: bool) -> None:
        text = call.text.encode()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        site = call.site.encode()[-_SITE_LIMIT:]
        if len(text) > _TEXT_LIMIT:
            text = text[: _TEXT_LIMIT - 3] + b"..."
        _HEADER.pack_into(self._sent, 0, self._number, digest, length, len(text), len(site), failed)
        self._sent[_TEXT_AT : _TEXT_AT + len(text)] = text
        self._sent[_TEXT_AT + len(text) : _TEXT_AT + len(text) + len(site)] = site

    def _swap_slots(self, call: Call) -> list[int]:
        """Send ours, receive all; returns the lengths of the bodies."""
        self._wait(self.group.allgather([self._slots], [self._sent_slot]), call)
        mine = self._sent[:24]
        lengths = []
        for view in self._views:
            header = _HEADER.unpack_from(view)
            if view[:24] != mine or header[5]:
                self._raise_mismatch()
            lengths.append(header[2])
        return lengths

    def _swap_long(
        self, call: Call, body: Sequence[torch.Tensor], lengths: list[int], source: int | None
    ) -> list[torch.Tensor]:
        longest = max(lengths)
        mine = torch.cat([*body, torch.empty(longest - lengths[self.rank], dtype=torch.uint8)])
        if source is None:
            everyone = self.all_gather_bytes(mine, call)
            return [row[:n] for row, n in zip(everyone, lengths, strict=True)]
        self.broadcast_bytes(mine, source, call)
        return [mine if rank == source else mine[:0] for rank in range(self.world_size)]

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
        return [_load(body) for body in self.exchange(text, [_dump(value)])]

    def broadcast_object(self, text: str, value: Any, source: int) -> Any:
        """The value of `source` on every rank; pickled on the way."""
        body = [_dump(value)] if self.rank == source else []
        return _load(self.exchange(text, body, source)[source])

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

    def _raise_mismatch(self) -> NoReturn:
        said = [self._describe(view) for view in self._views]
        lines = "\n".join(f"  {_ranks(ranks)}: {text}" for text, ranks in _grouped(said).items())
        raise CollectiveMismatchError(
            f"the ranks did not make the same call (collective number {self._number}):\n{lines}\n"
            "Every rank has to make the same collective calls in the same order, with data of one layout"
        )

    @staticmethod
    def _describe(view: memoryview) -> str:
        _, _, _, text_length, site_length, _ = _HEADER.unpack_from(view)
        site_at = _TEXT_AT + text_length
        text = bytes(view[_TEXT_AT:site_at]).decode(errors="replace")
        return f"{text}  at {bytes(view[site_at : site_at + site_length]).decode(errors='replace')}"

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

    def say_goodbye(self, limit_s: float) -> None:
        """At exit: ranks that may still read the store keep its host (rank 0) for up to `limit_s`."""
        if self._broken is not None or os.getpid() != self.pid:
            return
        with suppress(RuntimeError):  # a rank died without a word, or the host left: nobody is kept waiting for it
            self.store.set(f"bye/{self.rank}", "")
            if self.rank == 0:
                keys = [f"bye/{rank}" for rank in range(self.world_size)]
                self.store.wait(keys, timedelta(seconds=limit_s))


def _dump(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def _load(body: torch.Tensor) -> Any:
    return pickle.loads(ctypes.string_at(body.data_ptr(), body.numel()))  # noqa: S301  (from a rank of our own job)


def _grouped(said: Sequence[str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(said):
        groups.setdefault(text, []).append(rank)
    return groups


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
