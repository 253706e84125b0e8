"""Where in the user's code something was called: for messages about collectives, and for warnings. Torch-free."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from types import FrameType

_PASSED_OVER = frozenset(  # top-level packages: ours, and those through which ours are called
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
        "functools",
        "logging",
        "torch",
    }
)


_CHAIN = 4  # frames: enough to see which of several callers of a helper it was


def call_site() -> str:
    """`file:line` of the innermost frame that is the user's."""
    return next(map(_shown, _user_frames(sys._getframe(1))), "<unknown>")  # noqa: SLF001  (inspect.stack would cost a millisecond)


def call_chain() -> str:
    """As `call_site`, followed by its callers: `a.py:3, from b.py:5`."""
    return ", from ".join(map(_shown, islice(_user_frames(sys._getframe(1)), _CHAIN))) or "<unknown>"  # noqa: SLF001


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn as if from the line of the user's code that led here, however many frames of ours lie between.

    Args:
        message: what has no effect or will surprise, and what to do.
        category: of the warning.

    Python's filters see the user's module, and show one message once per line of it, as they do for `warnings.warn`.
    """
    here = sys._getframe(1)  # noqa: SLF001
    frame = next(_user_frames(here), here)
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__") or "<unknown>",
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _shown(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.partition(".")[0] not in _PASSED_OVER:
            yield frame
        frame = frame.f_back
