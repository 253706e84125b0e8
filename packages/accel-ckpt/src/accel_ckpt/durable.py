"""Bytes that survive: files hashed while they are written, flushed to the disk, and directories flushed after them.

Everything here goes through `os`, one system call at a time, so that a test can fail or kill at each of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

# Large enough to keep the disk busy, small enough that a piece is still in the cache when it is written after hashing.
PIECE_BYTES = 1 << 20
_LARGE_BYTES = 1 << 22
# JSON files describe; tensors lie elsewhere. A larger one is damaged or hostile.
MAX_JSON_BYTES = 1 << 28

_REASONS = {
    errno.ENOSPC: "the disk is full; free some space and save again",
    errno.EDQUOT: "the disk quota is used up; free some space and save again",
    errno.EROFS: "the file system is read-only; choose another directory",
    errno.EACCES: "permission denied; check the directory's owner and mode",
    errno.EPERM: "permission denied; check the directory's owner and mode",
    errno.ENOTDIR: "a part of the path is a file, not a directory; choose another directory",
    errno.ENAMETOOLONG: "the name is too long for this file system; choose a shorter one",
}


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and checksum of a file as it was written."""

    size_bytes: int
    xxh3_128: str


def os_reason(error: OSError) -> str:
    """What the operating system meant, and what to do about it."""
    known = _REASONS.get(error.errno or 0)
    where = f" ({error.filename})" if error.filename else ""
    return f"{known}{where}" if known else f"{error.strerror or error}{where}"


def write_file(path: Path, parts: Iterable[bytes | memoryview], expected_bytes: int = 0) -> FileEntry:
    """Write a new file from parts, hashing each piece while it is hot, and flush it to the disk.

    Args:
        expected_bytes: what the parts come to, if known; for a large file its blocks are then asked for at once, which
            makes the writes quicker and tells of a full disk before them.

    Raises:
        FileExistsError: the file is there already (a checkpoint's files are never written over).
        OSError: as the system reports it.
    """
    digest, size_bytes = xxhash.xxh3_128(), 0
    with _new_file(path, expected_bytes) as fd:
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                digest.update(piece)
                _write_all(fd, piece)
            size_bytes += len(view)
    return FileEntry(size_bytes=size_bytes, xxh3_128=digest.hexdigest())


def write_unhashed(path: Path, parts: Iterable[bytes | memoryview], expected_bytes: int = 0) -> None:
    """The same, for a file of which nobody asks the checksum."""
    with _new_file(path, expected_bytes) as fd:
        for part in parts:
            _write_all(fd, memoryview(part).cast("B"))


@contextlib.contextmanager
def _new_file(path: Path, expected_bytes: int) -> Iterator[int]:
    """A new file's descriptor; the file is flushed at the end of the block."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        if expected_bytes >= _LARGE_BYTES:
            _reserve(fd, expected_bytes)
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def _reserve(fd: int, size_bytes: int) -> None:
    """Ask the file system for blocks, if it can give them ahead.

    By the system's own call: `os.posix_fallocate` writes to every block where a file system has none.
    """
    if sys.platform != "linux":
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(size_bytes)) == 0:
        return
    if (code := ctypes.get_errno()) in (errno.ENOSPC, errno.EDQUOT):
        raise OSError(code, os.strerror(code))


def _write_all(fd: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(fd, piece) :]


def hash_file(path: Path) -> FileEntry:
    """Size and checksum of a file on disk, read once in pieces."""
    digest, size_bytes = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size_bytes += count
    return FileEntry(size_bytes=size_bytes, xxh3_128=digest.hexdigest())


def flush_file(path: Path) -> None:
    """Flush a file that someone else wrote (a hook) to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename_into_place(source: Path, target: Path) -> None:
    """Give a flushed file its name at one instant, over one that has it."""
    os.replace(source, target)  # noqa: PTH105 - one system call


def flush_directory(path: Path) -> None:
    """Make a directory's entries durable. Windows has no such call; its renames are journalled by the file system."""
    if sys.platform == "win32":
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: Path) -> None:
    """`mkdir -p` whose every new entry is durable."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        try:
            os.mkdir(directory)  # noqa: PTH102 - one system call, see the module's docstring
        except FileExistsError:
            continue  # another rank or job made it meanwhile
        flush_directory(directory.parent)


def read_json_bytes(path: Path) -> bytes:
    """A JSON file's bytes, unless it is larger than any that we write."""
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise OSError(
            errno.EFBIG, f"{size} bytes is more than a checkpoint's JSON can have ({MAX_JSON_BYTES})", str(path)
        )
    return path.read_bytes()
