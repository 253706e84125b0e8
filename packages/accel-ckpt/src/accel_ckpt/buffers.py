"""Host memory for private copies of tensors, kept from one save to the next."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from .tensors import PARALLEL_BYTES

_ALIGNMENT = 64  # bytes; a cache line
_MAX_THREADS = 4
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of Linux, which Python does not name


class CopyBuffers:
    """Memory for one copy, on each rank of what it writes.

    The first copy pays for fresh pages, later ones only for copying.
    See docs/decisions/private-copies.md for what else was tried.
    """

    def __init__(self) -> None:
        self._copies: dict[str, dict[str, Tensor]] = {}

    def private(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Copies of file -> key -> tensor, good until the next call."""
        if _forms(tensors) != _forms(self._copies):
            self._copies = {}  # given back before as much again is taken
            self._copies = _allocate(tensors)
        pairs = [(self._copies[file][key], tensor) for file, parts in tensors.items() for key, tensor in parts.items()]
        _copy(pairs)
        return self._copies


def _forms(tensors: Mapping[str, Mapping[str, Tensor]]) -> list[tuple[object, ...]]:
    return [(file, key, t.dtype, t.shape) for file, parts in tensors.items() for key, t in parts.items()]


def _allocate(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Contiguous tensors of the same shapes and types in one piece of memory."""
    spans = {
        (file, key): -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        for file, parts in tensors.items()
        for key, tensor in parts.items()
    }
    flat, offset = _fresh_memory(max(sum(spans.values()), 1)), 0
    copies: dict[str, dict[str, Tensor]] = {file: {} for file in tensors}
    for (file, key), span in spans.items():
        tensor = tensors[file][key]
        taken = flat[offset : offset + tensor.numel() * tensor.element_size()]
        copies[file][key] = taken.view(tensor.dtype).view(tensor.shape)
        offset += span
    return copies


def _fresh_memory(size_bytes: int) -> Tensor:
    """Zeros, as bytes, that no other process shares.

    A forked child (a data worker) gets an empty piece in its place: the next copy does not pay for pages that the two
    would share, and a child that saves too does not write into this process's copy.
    """
    if sys.platform != "linux":
        return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system that only looks like Linux; then a copy after a fork takes longer
        memory.madvise(_WIPE_ON_FORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy, large amounts in several threads: torch's own are set to one in many training jobs."""
    total_bytes = sum(target.nbytes for target, _ in pairs)
    threads = min(_MAX_THREADS, os.cpu_count() or 1, len(pairs))
    if total_bytes < PARALLEL_BYTES or threads < 2:
        for target, source in pairs:
            target.copy_(source)
        return
    with ThreadPoolExecutor(max_workers=threads) as pool:
        for _ in pool.map(lambda pair: pair[0].copy_(pair[1]), pairs):
            pass
