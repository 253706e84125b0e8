"""Messages of a batch from the rank that reads to one other: a note of fixed size, then the batch as bytes.

Tensors travel as their bytes, everything else pickled (as torch's own object collectives do, inside one job), so a
message is as long as what it carries, and a view never drags its whole storage along.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, fields
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_state.errors import CollectiveMismatchError, DataLoaderError

_ALIGNMENT = 16  # of each tensor in a message, so that any dtype can be viewed in place
_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's own for gloo


BATCH, END, FAILURE = range(3)


@dataclass(frozen=True)
class Note:
    """What comes with a message.

    Args:
        pass_number, step: which message this is, so that ranks that lost step find out.
        kind: a batch, the end without a batch, or the failure of the rank that reads (the payload is its text).
        is_last: whether this is the last round of the pass.
        remainder: real samples of a last round that is short; 0 for a full one, -1 before the last.
        size, real: samples of this rank's batch, and how many are not padding.
        is_padded: whether any rank's batch of this round holds padding.
        first_dry: the first part without a batch in this round, though others have one; 0 if there is none.
        num_bytes: of the payload.
    """

    pass_number: int
    step: int
    kind: int
    is_last: int = 0
    remainder: int = -1
    size: int = 0
    real: int = 0
    is_padded: int = 0
    first_dry: int = 0
    num_bytes: int = 0


@dataclass
class Wire:
    """Point-to-point messages in a gloo group of its own, so that they never mix with others.

    Made by all ranks together.

    Args:
        timeout: how long a rank waits for another.
        num_bytes_sent: so far, by receiving rank.
    """

    timeout: timedelta
    num_bytes_sent: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=self.timeout)
        self._in_flight: list[tuple[Any, Tensor]] = []

    def send(self, to: int, note: Note, payload: Tensor | None) -> None:
        """Begin to send; `flush` waits for it.

        Args:
            payload: flat uint8 on the CPU.
        """
        numbers = torch.tensor(astuple(note), dtype=torch.int64)
        for part in (numbers, payload):
            if part is not None:
                self._in_flight.append((dist.isend(part, to, group=self._group), part))
                self.num_bytes_sent[to] = self.num_bytes_sent.get(to, 0) + part.numel() * part.element_size()

    def flush(self, limit: timedelta | None = None) -> None:
        """Wait for everything sent to have left, by default for as long as the wire waits."""
        in_flight, self._in_flight = self._in_flight, []
        for work, _ in in_flight:
            self._wait(partial(work.wait, limit or self.timeout), "take a batch")

    def receive(self, source: int, pass_number: int, step: int) -> tuple[Note, Tensor]:
        """The next message of `source`.

        Raises:
            CollectiveMismatchError: it is not the one of this pass and step, or none came in time.
        """
        numbers = torch.empty(len(fields(Note)), dtype=torch.int64)
        self._wait(lambda: dist.recv(numbers, source, group=self._group), "send a batch")
        note = Note(*numbers.tolist())
        payload = torch.empty(note.num_bytes, dtype=torch.uint8)
        if note.num_bytes:
            self._wait(lambda: dist.recv(payload, source, group=self._group), "send a batch")
        if note.kind != FAILURE and (note.pass_number, note.step) != (pass_number, step):
            raise CollectiveMismatchError(
                f"A dispatched loader is at step {step} of pass {pass_number} here, but at step {note.step} of pass "
                f"{note.pass_number} on rank {source}. All ranks have to iterate it together, equally far."
            )
        return note, payload

    def _wait(self, wait: Callable[[], Any], what: str) -> None:
        try:
            wait()
        except RuntimeError as error:
            raise CollectiveMismatchError(
                f"A dispatched loader waited for another rank to {what}, up to {self.timeout}: {error}. All ranks have "
                "to iterate it together, equally far."
            ) from error


def job_timeout() -> timedelta:
    """How long ranks of this job wait for each other."""
    from accel_state.process_group import known_job

    job = known_job()
    return _DEFAULT_TIMEOUT if job is None or job.timeout is None else job.timeout


# ---------------------------------------------------------------- batches as bytes


def encode(batch: Any) -> Tensor:
    """A batch as flat uint8: the pickle's length, the pickle, then the bytes of its tensors.

    Raises:
        DataLoaderError: something in it cannot be pickled.
    """
    text = io.BytesIO()
    pickler = _TensorsApart(text)
    try:
        pickler.dump(batch)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise DataLoaderError(
            f"A batch of type {type(batch).__name__} cannot be sent to other ranks: {error}. Make the collate function "
            "return what can be pickled, or use dispatch_batches=False."
        ) from error
    pickled = text.getvalue()
    parts = [len(pickled).to_bytes(8, "little") + pickled, *pickler.tensors]
    begins = _begins([len(parts[0]), *(tensor.numel() for tensor in pickler.tensors)])
    message = torch.empty(begins[-1], dtype=torch.uint8)
    message[: len(parts[0])] = torch.frombuffer(bytearray(parts[0]), dtype=torch.uint8)
    for begin, tensor in zip(begins[1:], pickler.tensors, strict=False):
        message[begin : begin + tensor.numel()] = tensor
    return message


def decode(message: Tensor) -> Any:
    """The batch that was encoded; its tensors are views of `message`."""
    length = int.from_bytes(bytes(message[:8].tolist()), "little")
    text = io.BytesIO(ctypes.string_at(message.data_ptr() + 8, length))
    return _TensorsBack(text, message, 8 + length).load()


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def _begins(sizes: list[int]) -> list[int]:
    """Where each part begins, and where the last ends."""
    begins, end = [], 0
    for size in sizes:
        begins.append(_aligned(end))
        end = begins[-1] + size
    return [*begins, end]


class _TensorsApart(pickle.Pickler):
    """A pickler that keeps plain tensors of the CPU out of the pickle."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []

    def persistent_id(self, item: Any) -> Any:
        if type(item) is not Tensor or not item.is_cpu or item.layout is not torch.strided or item.requires_grad:
            return None
        if item.is_quantized or item.is_complex() or item.is_conj() or item.is_neg():
            return None
        self.tensors.append(item.contiguous().reshape(-1).view(torch.uint8))
        return item.dtype, tuple(item.shape)


class _TensorsBack(pickle.Unpickler):
    """Reads what `_TensorsApart` wrote: tensors come in the order in which they were met."""

    def __init__(self, file: io.BytesIO, message: Tensor, end: int) -> None:
        super().__init__(file)
        self._message, self._end = message, end

    def persistent_load(self, said: Any) -> Tensor:
        dtype, shape = said
        begin = _aligned(self._end)
        self._end = begin + dtype.itemsize * torch.Size(shape).numel()
        return self._message[begin : self._end].view(dtype).view(shape)
