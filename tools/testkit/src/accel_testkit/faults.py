"""Kill or fail a function at any of its file-system calls.

The calls are those of the module `os` that change files. Code under test has to make them as `os.rename(...)`, not
through names imported from `os`; the built-in `open` and `pathlib` reach the system by other ways and are not seen.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

CALLS = ("open", "write", "fsync", "rename", "replace", "link", "mkdir", "rmdir", "unlink")


@dataclass
class Trace:
    """The calls made so far, by name, in order."""

    calls: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watching(before: Callable[[int, str], None] | None = None) -> Iterator[Trace]:
    """Record the calls and run something before each.

    Args:
        before: gets the call's number, from 0, and its name; may raise, or end the process.
    """
    trace = Trace()
    originals = {name: getattr(os, name) for name in CALLS}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = len(trace.calls)
            trace.calls.append(name)
            if before is not None:
                before(number, name)
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in CALLS:
            setattr(os, name, wrap(name))
        yield trace
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def count_calls(action: Callable[[], object]) -> list[str]:
    """The calls that an action makes, in order."""
    with watching() as trace:
        action()
    return trace.calls


@contextlib.contextmanager
def failing_at(number: int, code: int) -> Iterator[None]:
    """Let one call, and every write after it, fail with an error number, as a full or dying disk does."""

    def fail(now: int, name: str) -> None:
        if now == number or (now > number and name == "write"):
            raise OSError(code, os.strerror(code))

    with watching(fail):
        yield


def killed_at(number: int, action: Callable[[], object]) -> bool:
    """Run an action in a forked child that is killed with -9 just before one of its calls.

    Returns:
        Whether it got that far. An action that ends on its own has fewer calls.

    Raises:
        RuntimeError: the action failed; its traceback is on standard error.
    """

    def kill(now: int, _name: str) -> None:
        if now == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def child() -> None:
        with watching(kill):
            action()

    return _wait(fork(child)) == -signal.SIGKILL


def in_child(action: Callable[[], object]) -> None:
    """Run an action in a forked child, for what cannot be undone in a process.

    Raises:
        RuntimeError: the action failed; its traceback is on standard error.
    """
    if code := _wait(fork(action)):
        raise RuntimeError(f"the child was ended by signal {-code}")


def killed_after(seconds: float, action: Callable[[], object]) -> bool:
    """Run an action in a forked child that is killed with -9 after a time; whether it was still running then."""
    pid = fork(action)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return _wait(pid) == -signal.SIGKILL


def spread(total: int, num_points: int, seed: int) -> list[int]:
    """A sample of 0 .. total - 1, sorted, ends included: which of many points to try."""
    if total <= num_points:
        return list(range(total))
    inner = random.Random(seed).sample(range(1, total - 1), num_points - 2)
    return [0, *sorted(inner), total - 1]


def fork(action: Callable[[], object]) -> int:
    """Run an action in a forked child; its process id. A failure's traceback goes to standard error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of threads; the child uses none of them
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        action()
        code = 0
    except BaseException:  # noqa: BLE001 - the child must not return into the test runner
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(pid: int) -> int:
    """How a child ended: 0, or minus the signal that ended it."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return -os.WTERMSIG(status)
    if os.WEXITSTATUS(status):
        raise RuntimeError(f"the action failed in the child with exit status {os.WEXITSTATUS(status)}")
    return 0


def message_of(action: Callable[[], Any]) -> str:
    """What a call fails with, as text that a rank can hand back: "<type>: <message>", or "no error"."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - a test compares the text, the type included
        return f"{type(error).__name__}: {error}"
    return "no error"
