"""Copying the next batch to a device while the current one is computed on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .placement import placement


class DevicePrefetcher:
    """The batches of any iterable, on a device; on an accelerator each is copied while the one before is in use.

    A prepared loader with `non_blocking=True` does this by itself. Wrap it around what is no DataLoader: nothing is
    cut, counted or saved. Copies overlap only from pinned memory (`pin_memory=True`).

    Args:
        batches: iterated anew each time.
        device: where batches go. On the CPU nothing is read ahead and nothing is added.
    """

    def __init__(self, batches: Iterable[Any], device: torch.device | str) -> None:
        self.batches = batches
        self.device = torch.device(device)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return moved(iter(self.batches), self.device, non_blocking=True)


def moved(batches: Iterator[Any], device: torch.device | None, *, non_blocking: bool) -> Iterator[Any]:
    """Batches where they belong: as they are, copied in turn, or copied ahead on a stream of its own."""
    move = placement(device, non_blocking)
    if move is None or device is None:
        return batches
    if device.type == "cpu" or not non_blocking or not hasattr(torch.Stream, "__enter__"):
        return map(move, batches)
    return _copied_ahead(map(move, batches), device)


def _copied_ahead(moving: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """One batch ahead of the user; `moving` copies without waiting whenever it is advanced."""
    side = torch.Stream(device)
    missing = object()

    def fetch() -> tuple[Any, torch.Event]:
        with side:
            return next(moving, missing), side.record_event()

    batch, copied = fetch()
    while batch is not missing:
        following = fetch()
        computing = torch.accelerator.current_stream(device)
        computing.wait_event(copied)
        _keep_until_used(batch, computing)
        yield batch
        batch, copied = following


def _keep_until_used(batch: Any, stream: torch.Stream) -> None:
    """The allocator may otherwise hand memory of the side stream out again while `stream` still reads it."""
    from accel_state import recursively_apply

    def keep(leaf: Tensor) -> Tensor:
        leaf.record_stream(stream)
        return leaf

    recursively_apply(keep, batch)
