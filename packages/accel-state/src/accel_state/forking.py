"""Forks in a process whose other threads use Python, on interpreters before 3.11.8.

A thread that was not made by Python takes a lock of the interpreter for a moment when it first touches a Python object.
gloo's threads do so at the end of a collective, when they let go of what it carried; a data loader's workers are forked
soon after one. A process forked in that moment waits for the lock for ever, before it runs a line
(https://github.com/python/cpython/issues/112275, mended in 3.11.8): its ranks hang at the beginning of an epoch, about
once in a thousand on busy processors.
"""

from __future__ import annotations

import os
import sys


def wait_for_the_thread_list() -> None:
    """Return when no thread that held the interpreter's list of threads still does: reading the list needs its lock."""
    sys._current_frames()  # noqa: SLF001  # documented, in spite of its name


def guard_forks() -> None:
    """Let every fork from here on wait for that lock. Does nothing on interpreters that do without; call it once."""
    if sys.version_info < (3, 11, 8):
        os.register_at_fork(before=wait_for_the_thread_list)
