"""Environments beside ``.venv``, for libraries that must not come near it: pinned in ``uv.lock``, made once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from devtool.environment import UV, export_pins, install_pins, installer_environment
from devtool.isolated import site_packages
from devtool.paths import PYTHON, ROOT, must_run, say

TEST_GROUP = ("--package", "accel-workspace", "--only-group", "test")


def side_environment(folder: Path, below: str, *selections: Sequence[str], text: str) -> Path:
    """The interpreter of an environment, made when it is missing or its pins or what lies below changed.

    Args:
        folder: where it lies; its pins and stamp lie beside and in it.
        below: lines of a ``.pth`` file: what its path has besides, after its own (``shared_lines``).
        selections: what ``export_pins`` takes, one list of pins each.
        text: what it is made for, told while it is made.
    """
    python, stamp = folder / "bin" / "python", folder / "stamp.json"
    pins = [
        export_pins(folder.with_name(f"{folder.name}-{number}.txt"), *selection)
        for number, selection in enumerate(selections)
    ]
    key = json.dumps({"pins": [hashlib.sha256(path.read_bytes()).hexdigest() for path in pins], "below": below})
    if not stamp.exists() or stamp.read_text() != key:
        say(f"making {folder.relative_to(ROOT)} {text}")
        command = [UV, "venv", "--quiet", "--clear", "--no-config", "--python", PYTHON, folder]
        must_run(command, env=installer_environment())
        for requirements in pins:
            install_pins(python, requirements)
        (site_packages(python) / "below.pth").write_text(below)
        stamp.write_text(key)
    return python
