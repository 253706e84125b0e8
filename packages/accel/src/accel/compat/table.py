"""Reads the one table of names, `table.txt`, and fetches what it names."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = "accelerate"
Names = Mapping[str, str]  # name -> owner


@functools.cache
def places() -> Mapping[str, Names]:
    """Each module of `accelerate`, packages before their modules, with its names and their owners."""
    found: dict[str, dict[str, str]] = {ROOT: {}}
    for line in Path(__file__).with_name("table.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, owner, *where = line.split()
            for place in where:
                found.setdefault(ROOT if place == "." else f"{ROOT}.{place}", {})[name] = owner
    for place in list(found):
        while place != ROOT:
            place = place.rpartition(".")[0]
            found.setdefault(place, {})
    return MappingProxyType(dict(sorted(found.items())))


def children(place: str) -> list[str]:
    """The last parts of the modules directly in a place."""
    return [other.rpartition(".")[2] for other in places() if other.rpartition(".")[0] == place]


def is_offered(name: str, owner: str) -> bool:
    """Whether the owner exports the name by now; imports the owner, but not what is behind the name."""
    module, attribute = _target(name, owner)
    public = getattr(importlib.import_module(module), "__all__", None)
    return attribute in public if public is not None else hasattr(importlib.import_module(module), attribute)


def fetch(name: str, owner: str) -> Any:
    """The object behind a name that its owner exports."""
    module, attribute = _target(name, owner)
    return getattr(importlib.import_module(module), attribute)


def _target(name: str, owner: str) -> tuple[str, str]:
    module, _, attribute = owner.partition(":")
    return module, attribute or name
