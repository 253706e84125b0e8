"""Who is writing here? A lock file in each unfinished directory, released by the system when its process dies.

`flock` knows neither process ids nor hosts, so it also holds in containers and over NFS. Where a file system has no
locks, the file's text (host and process id) decides, and a directory from another host is left alone.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from pathlib import Path

from .names import OWNER_NAME

if sys.platform != "win32":
    import fcntl

_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class Alive(Exception):  # noqa: N818 - an answer, not a fault
    """The directory's owner is alive; `certain` is False where that can only not be ruled out."""

    def __init__(self, *, certain: bool) -> None:
        super().__init__()
        self.certain = certain


class Claim:
    """Ownership of a directory, until it is released or the process ends."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def release(self) -> None:
        """Give it up; may be called again."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def claim(directory: Path, name: str = OWNER_NAME) -> Claim:
    """Become the owner of a directory that this process has just made.

    Args:
        name: of the lock file; others than the default are locks for something else in the directory.

    Raises:
        FileNotFoundError: someone took the still empty directory for a leftover and removed it; make another.
    """
    path = directory / name
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            locked = _lock(fd)
            if _same_file(fd, path):
                text = {"host": socket.gethostname(), "pid": os.getpid(), "locked": locked}
                os.write(fd, json.dumps(text).encode())
                return Claim(fd)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, Alive):
                continue  # a cleaner is just looking at the file; it will remove it
            raise
        os.close(fd)


def take_over(directory: Path, name: str = OWNER_NAME) -> Claim | None:
    """Become the owner of a directory whose owner is dead; `name` as in `claim`.

    Returns:
        The claim; None if the directory has no owner file.

    Raises:
        Alive: it is not known to be dead.
    """
    path = directory / name
    while True:
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            if not _lock(fd) and not _process_is_dead(os.pread(fd, 4096, 0)):
                raise Alive(certain=False)
            if _same_file(fd, path):
                return Claim(fd)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its owner took it elsewhere after it was opened


def describe_owner(directory: Path) -> str:
    """`process 12 on host a`, for messages."""
    try:
        text = json.loads((directory / OWNER_NAME).read_bytes())
        return f"process {text['pid']} on {text['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _lock(fd: int) -> bool:
    """Whether the lock is ours now; False where the file system has none."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Alive(certain=True) from error
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _process_is_dead(text: bytes) -> bool:
    try:
        owner = json.loads(text)
        host, pid = owner["host"], owner["pid"]
    except (ValueError, KeyError, TypeError):
        return False
    if host != socket.gethostname() or sys.platform == "win32":
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
