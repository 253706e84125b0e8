"""A collective while it runs, and the block in which a rank goes first."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from accel_state.callsite import call_site
from accel_state.errors import ProcessGroupError


class Call:
    """A collective as the user made it, and the hold on the channel while it runs: `with channel.begin(...) as call`.

    Args:
        text: operation and data layout, equal on all ranks.
        lock: of the channel, held already; given back at the end of the block.
    """

    __slots__ = ("_lock", "text")

    def __init__(self, text: str, lock: threading.Lock) -> None:
        self.text = text
        self._lock = lock

    @property
    def site(self) -> str:
        """Where it was called; only asked for while it runs, for a message."""
        return call_site()

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class GoingFirst(NamedTuple):
    """A block that this rank runs while the others wait outside.

    name: of what made it, as `main_process_first`.
    site: where it was entered.
    depth: 1, and one more for each such block around it.
    thread: that runs it.
    """

    name: str
    site: str
    depth: int
    thread: int

    def refuse(self, operation: str, rank: int) -> None:
        """Raise for a collective inside the block, for which the others could never come.

        Raises:
            ProcessGroupError: in the thread that runs the block.
        """
        if threading.get_ident() == self.thread:
            raise ProcessGroupError(
                f"rank {rank} called {operation} at {call_site()} inside {self.name}, entered at {self.site}: the "
                "other ranks wait outside until the block is done, and cannot come. Call it after the block"
            )


class Replies(NamedTuple):
    """What an exchange brought from every rank.

    heads: each rank's head.
    lengths: each rank's body's length in bytes.
    bodies: `[world_size, n]` uint8, one row per rank; valid until the next exchange.
    """

    heads: list[bytes]
    lengths: list[int]
    bodies: torch.Tensor
