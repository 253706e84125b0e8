"""Puts the alias first on the import path, of this process and of those that it starts."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from accel_state.errors import AliasError

ALIAS_FOLDER = Path(__file__).resolve().parents[1] / "_alias"


def install() -> None:
    """From now on `accelerate` is accel, in this process and in its children. A second call changes nothing.

    Raises:
        AliasError: another `accelerate` was imported before; two of them in one process would not know each other's
            objects.
    """
    loaded = sys.modules.get("accelerate")
    origin = getattr(loaded, "__file__", None)
    if loaded is not None and not (origin and Path(origin).resolve().is_relative_to(ALIAS_FOLDER)):
        raise AliasError(
            f"`accelerate` was imported already, from {origin or 'an unknown place'}, and cannot be replaced in a "
            "running program: call accel.compat.install() before anything that imports accelerate (transformers "
            "does), or start the script with `python -m accel.compat script.py`"
        )
    folder = str(ALIAS_FOLDER)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    os.environ["PYTHONPATH"] = child_environment(os.environ)["PYTHONPATH"]
    importlib.invalidate_caches()  # what was not found before (find_spec, metadata) is looked for again


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of an environment in which child processes see the alias: its folder leads PYTHONPATH.

    A child whose Python lacks accel gets the `accelerate` that is installed there.
    """
    folder = str(ALIAS_FOLDER)
    others = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != folder]
    return {**environ, "PYTHONPATH": os.pathsep.join([folder, *others])}
