"""Inference through a pipeline of stages: the names that other code imports from a module of this name.

The names, and who owns each, stand in `accel/compat/table.txt`, in the lines of `accelerate.inference`.
"""

# ruff: noqa: F403  the star below is for type checkers only
from __future__ import annotations

from typing import TYPE_CHECKING

from accel.compat.places import lazy_names
from accel.compat.table import places

__getattr__, __dir__ = lazy_names(__name__, globals(), places()["accelerate.inference"])

if TYPE_CHECKING:
    from accel_parallel import *
