"""Who failed first, and how to say so."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from accel_launch.spawn.child import Child

_HEADER = "Traceback (most recent call last)"
_JOINTS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_MAX_LINES = 20


def first_failure(children: Sequence[Child]) -> Child | None:
    """The child that the others failed because of, or None when all ended well.

    A rank that raises is often outlived by those whose collectives it broke: it shuts down while they already left.
    So the moment is that of its traceback where it wrote one, else that of its end. A rank that we ended is only to
    blame when its traceback came before every other failure.
    """
    failed = [child for child in children if child.returncode not in (None, 0) and not child.was_signalled]
    torn_down = [child for child in children if child.was_signalled and _ends_in_traceback(child.tail)]
    if not failed:
        return next((child for child in children if child.returncode), None)
    return min([*failed, *torn_down], key=lambda child: min(child.failed_at_s, child.ended_at_s))


def exit_code(children: Sequence[Child], blamed: Child) -> int:
    """The blamed rank's exit code as a shell shows it; that of another failure where we cut the blamed one short."""
    codes = [blamed, *(child for child in children if child.returncode and not child.was_signalled)]
    own = next((child for child in codes if not child.was_signalled), blamed)
    return shell_code(own.returncode or 0)


def shell_code(returncode: int) -> int:
    """128 + n for a process that signal n ended, as shells have it."""
    return 128 - returncode if returncode < 0 else returncode


def describe(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = "; where nobody did that by hand, the system ran out of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def failure_message(blamed: Child, children: Sequence[Child]) -> str:
    """The last words on the console: one line that names the rank, then what it wrote about its failure."""
    how = "its error" if blamed.was_signalled else describe(blamed.returncode or 0)
    if len(children) == 1:
        return f"accel launch: the process ended: {how}\n" if blamed.returncode and blamed.returncode < 0 else ""
    others = "; the others were ended" if any(child.was_signalled for child in children if child != blamed) else ""
    line = f"accel launch: rank {blamed.rank} of {len(children)} failed first: {how}{others}"
    words = last_words(blamed.tail)
    return f"\n{line}\n{words}\n" if words else f"\n{line}\n"


def last_words(tail: str) -> str:
    """The last traceback with those that it came from; without any, the last lines."""
    start = tail.rfind(_HEADER)
    if start < 0:
        return "\n".join(tail.rstrip().splitlines()[-_MAX_LINES:])
    while tail[: tail.rfind("\n", 0, start) + 1].rstrip().endswith(_JOINTS):
        earlier = tail.rfind(_HEADER, 0, start)
        if earlier < 0:
            break
        start = earlier
    return tail[tail.rfind("\n", 0, start) + 1 :].rstrip()


def _ends_in_traceback(tail: str) -> bool:
    start = tail.rfind(_HEADER)
    if start < 0:
        return False
    frames = [line for line in tail[start:].splitlines()[1:] if line and not line.startswith(" ")]
    return len(frames) == 1  # the exception's own line and nothing after it
