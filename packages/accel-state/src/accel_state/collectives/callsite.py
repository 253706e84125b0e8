"""Where in the user's code a collective was called."""

from __future__ import annotations

import sys
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


def call_site() -> str:
    """`file:line` of the innermost frame that is not accel's own."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (inspect.stack would cost a millisecond)
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.partition(".")[0] not in _OURS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "<unknown>"
