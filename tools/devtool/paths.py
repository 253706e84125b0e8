"""Where things lie in a checkout, and how a command is run there."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
BIN = VENV / "bin"
PYTHON = BIN / "python"
CACHE = ROOT / ".cache"


Command = Sequence[object]  # strings and paths; each part is given as its text


class DevError(Exception):
    """Something that the person at the keyboard can put right; the message says how."""


def packages() -> list[str]:
    """Distribution names of the workspace's members, sorted."""
    return sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))


def import_name(package: str) -> str:
    """The name under which a member is imported."""
    return package.replace("-", "_")


def pyproject(package: str | None = None) -> dict[str, Any]:
    """The parsed ``pyproject.toml`` of a member, or of the workspace."""
    folder = ROOT / "packages" / package if package else ROOT
    return tomllib.loads((folder / "pyproject.toml").read_text())


def say(text: str) -> None:
    """One line about what is being done, apart from the command's own output."""
    print(f"tools/dev: {text}", file=sys.stderr, flush=True)


def run(command: Command, *, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> int:
    """Run a command with its output on the terminal; returns its exit code."""
    return subprocess.run([str(part) for part in command], env=env, cwd=cwd, check=False).returncode


def must_run(command: Command, *, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> None:
    """Run a command and raise ``DevError`` that names it when it fails."""
    code = run(command, env=env, cwd=cwd)
    if code != 0:
        raise DevError(f"this command failed with exit code {code} (its output is above):\n  {_shown(command)}")


def output_of(command: Command, *, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    """What a command wrote to its standard output; raises ``DevError`` with both streams when it fails."""
    done = subprocess.run(
        [str(part) for part in command], env=env, cwd=cwd, check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise DevError(
            f"this command failed with exit code {done.returncode}:\n  {_shown(command)}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def become(command: Command, *, env: Mapping[str, str] | None = None) -> NoReturn:
    """Replace this process by a command, run from the project's root, so that signals and exit codes are its own."""
    os.chdir(ROOT)
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = [str(part) for part in command]
    os.execve(arguments[0], arguments, dict(os.environ if env is None else env))


def _shown(command: Command) -> str:
    return " ".join(str(part) for part in command)
