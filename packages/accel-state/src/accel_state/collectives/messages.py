"""Objects and texts on their way between ranks: as bytes, and as people read them."""

from __future__ import annotations

import ctypes
import hashlib
import pickle
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

_SHOWN = 300  # characters of a text that are shown in full


@lru_cache(maxsize=1024)
def digest(text: str) -> bytes:
    """16 bytes that differ where texts do."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def dump(value: Any) -> torch.Tensor:
    """A value, pickled, as flat uint8."""
    return bytes_tensor(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def load(body: torch.Tensor) -> Any:
    """The opposite of `dump`; what follows the pickle is passed over."""
    return pickle.loads(to_bytes(body))  # noqa: S301  (from a rank of our own job)


def bytes_tensor(data: bytes) -> torch.Tensor:
    """Flat uint8 of the CPU."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def to_bytes(body: torch.Tensor) -> bytes:
    """The opposite of `bytes_tensor`."""
    return ctypes.string_at(body.data_ptr(), body.numel())


def shortened(texts: Sequence[str]) -> list[str]:
    """Long texts, from a little before where they begin to differ."""
    if max(map(len, texts)) <= _SHOWN:
        return list(texts)
    common = next((at for at, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), 0)
    start = max(common - 100, 0)
    return [("..." if start else "") + text[start : common + 100] + "..." for text in texts]


def grouped(said: Sequence[str]) -> dict[str, list[int]]:
    """The ranks that said each text."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(said):
        groups.setdefault(text, []).append(rank)
    return groups
