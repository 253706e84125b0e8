"""Waiting for something that has to be asked for, such as a key in the store; torch-free.

The store's own `wait` prints to stderr when its time is over, and holds up Ctrl-C until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORTEST_S, _LONGEST_S = 0.001, 0.1  # between two questions: soon at first, seldom where it takes long


def until(is_so: Callable[[], bool], limit_s: float) -> bool:
    """Ask again and again until it is so or the time is over; returns whether it is so."""
    deadline = time.monotonic() + limit_s
    pause_s = _SHORTEST_S
    while not is_so():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, _LONGEST_S)
    return True
