"""Where in the user's code a collective was called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType

_OURS = frozenset(
    {
        "accel",
        "accel_state",
        "accel_data",
        "accel_precision",
        "accel_parallel",
        "accel_ckpt",
        "accel_tracking",
        "accel_launch",
        "contextlib",
    }
)


_CHAIN = 4  # frames: enough to see which of several callers of a helper it was


def call_site() -> str:
    """`file:line` of the innermost frame that is not accel's own."""
    return next(_user_frames(sys._getframe(1)), "<unknown>")  # noqa: SLF001  (inspect.stack would cost a millisecond)


def call_chain() -> str:
    """As `call_site`, followed by its callers: `a.py:3, from b.py:5`."""
    return ", from ".join(islice(_user_frames(sys._getframe(1)), _CHAIN)) or "<unknown>"  # noqa: SLF001


def _user_frames(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.partition(".")[0] not in _OURS:
            yield f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
