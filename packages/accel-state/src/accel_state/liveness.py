"""Whether another rank's process still runs: asked of the kernel, where it is on this machine; torch-free."""

from __future__ import annotations

import json
import os
import socket
from functools import cache
from pathlib import Path
from typing import Literal

ProcessState = Literal["running", "stopped", "gone"]

_STARTED_AT = 19  # of the fields of /proc/PID/stat that follow the name: state is 0


def whereabouts() -> str:
    """A text by which others find this process."""
    return json.dumps([_machine(), os.getpid(), _read(os.getpid())[1]])


def state_of(text: str) -> ProcessState | None:
    """What has become of the process that a text of `whereabouts` describes; None where that cannot be known here.

    A process that has ended and whose number was given to another one is gone too.
    """
    machine, pid, started = json.loads(text)
    if machine != _machine():
        return None
    letter, started_now = _read(pid)
    if letter in ("Z", "X") or started_now != started:
        return "gone"
    return "stopped" if letter in ("T", "t") else "running"


def _read(pid: int) -> tuple[str, str]:
    """State's letter and start time; X where there is no such process."""
    if not Path("/proc/self/stat").exists():  # not Linux: only whether there is one
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "X", ""
        except PermissionError:
            return "R", ""
        return "R", ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", ""
    return fields[0], fields[_STARTED_AT]


@cache
def _machine() -> str:
    """The same for two processes only if they see the same process numbers."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [socket.gethostname(), boot.read_text().strip() if boot.exists() else ""]
    return " ".join([*parts, str(namespace.readlink()) if namespace.is_symlink() else ""])
