"""The subcommands that installed packages bring: entry points of the group `accel.commands`.

`importlib.metadata` finds them too, but importing it takes longer than everything else that `accel --help` does
(60 of 110 ms); the files that it reads are small and plain.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

GROUP = "accel.commands"


def find_commands(path: Iterable[str] | None = None) -> dict[str, str]:
    """Name to `module:function` of every subcommand, in alphabetical order; what is found first on the path wins.

    Args:
        path: folders to search for installed packages; `sys.path` by default.
    """
    found: dict[str, str] = {}
    for folder in sys.path if path is None else path:
        for text in _entry_point_files(Path(folder or ".")):
            for name, target in _entries(text):
                found.setdefault(name, target)
    return dict(sorted(found.items()))


def load(target: str) -> Callable[[Any], object]:
    """The function that `module:function` names."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def _entry_point_files(folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        return
    for metadata in sorted(folder.glob("*.dist-info")):
        try:
            yield (metadata / "entry_points.txt").read_text(encoding="utf-8")
        except OSError:  # most packages have none
            continue


def _entries(text: str) -> Iterator[tuple[str, str]]:
    section = ""
    for line in text.splitlines() if f"[{GROUP}]" in text else ():
        line = line.strip()
        if line.startswith("["):
            section = line
        elif section == f"[{GROUP}]" and "=" in line:
            name, _, target = line.partition("=")
            yield name.strip(), target.strip()
