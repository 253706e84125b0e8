"""Fetching the weights of the layer that comes next while one computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from accel_state.devices import device_kind

_PAGE_BYTES = 4096


class Layer(Protocol):
    """What is fetched: the weights of one module."""

    def weights(self) -> list[Tensor]:
        """Where they lie, in memory or mapped from files."""

    def device(self) -> torch.device:
        """Where they are wanted."""

    def is_slow(self) -> bool:
        """Whether bringing them there takes longer than asking another thread to do it."""


@dataclass(frozen=True)
class _Fetched:
    """Weights on their device, and what tells when they have arrived (None: they have)."""

    weights: list[Tensor]
    arrived: Any = None


class Prefetcher:
    """The order in which the layers of one model run, and the weights of the one that comes next.

    The order is that in which they were added, until a forward shows another. At most one layer is fetched ahead, so
    that a device holds the weights of two at a time; where an accelerator has no room for it, nothing is fetched ahead.
    """

    def __init__(self) -> None:
        self._next: dict[Layer, Layer] = {}
        self._added: Layer | None = None
        self._last: Layer | None = None
        self._pending: tuple[Layer, Future[_Fetched | None]] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.has_warned = False  # what all layers would say is said once

    def __deepcopy__(self, memo: dict[int, Any]) -> Prefetcher:
        return Prefetcher()  # threads cannot be copied, and the order is learned anew

    def __reduce__(self) -> tuple[type[Prefetcher], tuple[()]]:
        return Prefetcher, ()

    def add(self, layer: Layer) -> None:
        """Note a layer, in the order of registration."""
        if self._added is not None:
            self._next[self._added] = layer
        self._added = layer

    def take(self, layer: Layer) -> list[Tensor]:
        """The weights of a layer that is about to compute; those of the next one are asked for.

        Raises:
            Exception: what reading them raised.
        """
        fetched = self._collect(layer)
        if self._last is not None and self._last is not layer:
            self._next[self._last] = layer
        self._last = layer
        following = self._next.get(layer)
        if following is not None and following is not layer and following.is_slow():
            if self._thread is None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offloaded-weights")
            self._pending = following, self._thread.submit(_fetch_if_room, following)
        if fetched is None:
            return _bring(layer.weights(), layer.device(), non_blocking=False)
        if fetched.arrived is not None:
            _wait(fetched, layer.device())
        return fetched.weights

    def finish(self) -> None:
        """The forward of the whole model is over: nothing follows the last layer, and what was fetched for it goes."""
        if self._last is not None:
            self._next.pop(self._last, None)
        self._last = None
        if self._pending is not None:
            self._pending[1].cancel()
            self._pending = None

    def _collect(self, layer: Layer) -> _Fetched | None:
        if self._pending is None:
            return None
        (fetched_for, future), self._pending = self._pending, None
        if fetched_for is layer:
            return future.result()
        future.cancel()
        return None


def _bring(weights: list[Tensor], device: torch.device, non_blocking: bool) -> list[Tensor]:
    return [weight.detach().to(device, non_blocking=non_blocking) for weight in weights]


def _fetch_if_room(layer: Layer) -> _Fetched | None:
    """On the thread: the weights on their device; None where there is no room for them."""
    weights, device = layer.weights(), layer.device()
    if device.type == "cpu":
        for weight in weights:
            _read_pages(weight)
        return _Fetched(_bring(weights, device, non_blocking=False))
    kind = device_kind(device)
    functions: Any = kind.functions()
    if not hasattr(functions, "Stream") or _free_bytes(kind.call, device) < sum(weight.nbytes for weight in weights):
        return None
    stream = functions.Stream(device=device)
    with functions.stream(stream) if hasattr(functions, "stream") else nullcontext():
        brought = _bring(weights, device, non_blocking=True)
        return _Fetched(brought, stream.record_event())


def _free_bytes(call: Callable[..., Any], device: torch.device) -> int:
    """What an accelerator has free, with what torch keeps of it; 0 where it does not tell."""
    free, _ = call("mem_get_info", device, default=(0, 0))
    kept = call("memory_reserved", device, default=0) - call("memory_allocated", device, default=0)
    return int(free + kept)


def _wait(fetched: _Fetched, device: torch.device) -> None:
    """Let the computing stream wait, not the program; and keep the memory until that stream is done with it."""
    functions: Any = device_kind(device).functions()
    stream = functions.current_stream(device)
    stream.wait_event(fetched.arrived)
    for weight in fetched.weights:
        weight.record_stream(stream)


def _read_pages(weight: Tensor) -> None:
    """Have the system read a mapped file: touch a byte of each page, without holding Python's lock."""
    flat = weight.detach().reshape(-1)
    if flat.numel():
        flat.view(torch.uint8)[::_PAGE_BYTES].max()
