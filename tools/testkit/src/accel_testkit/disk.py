"""What a power cut leaves: record an action's file-system calls, then build the disk as it may be after any of them.

A kill keeps what was written; a power cut keeps only what was flushed. Here a file's data survives up to its last
`fsync`. A directory's changes survive the `fsync` of the directory, or, since file systems flush them when they like,
at once: both are tried. A rename survives wholly or not at all, as every journalling file system has it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(eq=False)
class Node:
    """A file or a directory, as it is in memory and as it is on the disk."""

    is_dir: bool
    data: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""
    entries: dict[str, Node] = field(default_factory=dict)
    flushed_entries: dict[str, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One call of `os`: `handle` is the number of the open file, `other` the second path."""

    name: str
    path: str = ""
    other: str = ""
    handle: int = -1
    data: bytes = b""
    flags: int = 0


@contextlib.contextmanager
def recording(root: Path) -> Iterator[list[Call]]:
    """Record the calls below a directory that change it or flush it. Calls have to be made as `os.rename(...)`."""
    calls: list[Call] = []
    handles: dict[int, int] = {}
    names = ("open", "write", "fsync", "rename", "replace", "link", "mkdir", "rmdir", "unlink")
    originals: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in names}

    def inside(path: Any) -> str:
        text = os.path.abspath(os.fspath(path))  # noqa: PTH100 - links must stay unresolved
        return os.path.relpath(text, root) if text == str(root) or text.startswith(f"{root}{os.sep}") else ""

    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        fd: int = originals["open"](path, flags, *args, **kwargs)
        handles.pop(fd, None)
        if where := inside(path):
            handles[fd] = len(calls)
            calls.append(Call("open", where, handle=len(calls), flags=flags))
        return fd

    def wrote(fd: int, data: Any) -> int:
        count: int = originals["write"](fd, data)
        if fd in handles:
            calls.append(Call("write", handle=handles[fd], data=bytes(memoryview(data).cast("B")[:count])))
        return count

    def flushed(fd: int) -> None:
        originals["fsync"](fd)
        if fd in handles:
            calls.append(Call("fsync", handle=handles[fd]))

    def by_path(name: str) -> Callable[..., None]:
        def call(path: Any, *args: Any, **kwargs: Any) -> None:
            originals[name](path, *args, **kwargs)
            if where := inside(path):
                two = name in ("rename", "replace", "link")
                calls.append(Call(name, where, inside(args[0]) if two else ""))

        return call

    replaced = {"open": opened, "write": wrote, "fsync": flushed} | {name: by_path(name) for name in names[3:]}
    try:
        for name, function in replaced.items():
            setattr(os, name, function)
        yield calls
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


class Disk:
    """A directory tree that calls are replayed on; all that is there at the beginning is flushed."""

    def __init__(self, root: Path) -> None:
        self._root = _read(root)
        self._open: dict[int, Node] = {}
        self._pending: list[list[tuple[Node, str, Node | None]]] = []

    def replay(self, call: Call) -> None:
        """Make one more call."""
        if call.name == "open":
            self._open[call.handle] = self._opened(call)
        elif call.name == "write":
            self._open[call.handle].data += call.data
        elif call.name == "fsync":
            self._flush(self._open[call.handle])
        elif call.name == "mkdir":
            self._edit((*self._place(call.path), Node(is_dir=True)))
        elif call.name in ("rmdir", "unlink"):
            self._edit((*self._place(call.path), None))
        elif call.name == "link":
            parent, name = self._place(call.path)
            self._edit((*self._place(call.other), parent.entries[name]))
        else:
            parent, name = self._place(call.path)
            self._edit((parent, name, None), (*self._place(call.other), parent.entries[name]))

    def write(self, target: Path, *, entries_at_once: bool) -> None:
        """Build the tree that a power cut now would leave.

        Args:
            entries_at_once: the directories' changes have reached the disk without a flush; data has not.
        """
        _write(self._root, target, entries_at_once)

    def _opened(self, call: Call) -> Node:
        if call.path == ".":
            return self._root
        parent, name = self._place(call.path)
        if name not in parent.entries:
            self._edit((parent, name, Node(is_dir=False)))
        node = parent.entries[name]
        if call.flags & os.O_TRUNC:
            node.data.clear()
        return node

    def _place(self, path: str) -> tuple[Node, str]:
        *parents, name = Path(path).parts
        node = self._root
        for part in parents:
            node = node.entries[part]
        return node, name

    def _edit(self, *edits: tuple[Node, str, Node | None]) -> None:
        self._pending.append(list(edits))
        for parent, name, node in edits:
            _set(parent.entries, name, node)

    def _flush(self, node: Node) -> None:
        if not node.is_dir:
            node.flushed = bytes(node.data)
            return
        concerned, later = {id(node)}, []
        for edits in reversed(self._pending):
            if any(id(parent) in concerned for parent, _, _ in edits):
                concerned |= {id(parent) for parent, _, _ in edits}
                later.append(edits)
        for edits in reversed(later):
            self._pending.remove(edits)
            for parent, name, child in edits:
                _set(parent.flushed_entries, name, child)


def _set(entries: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


def _read(path: Path) -> Node:
    if path.is_dir():
        entries = {child.name: _read(child) for child in path.iterdir()}
        return Node(is_dir=True, entries=dict(entries), flushed_entries=dict(entries))
    data = path.read_bytes()
    return Node(is_dir=False, data=bytearray(data), flushed=data)


def _write(node: Node, target: Path, entries_at_once: bool) -> None:
    if not node.is_dir:
        target.write_bytes(node.flushed)
        return
    target.mkdir()
    for name, child in (node.entries if entries_at_once else node.flushed_entries).items():
        _write(child, target / name, entries_at_once)
