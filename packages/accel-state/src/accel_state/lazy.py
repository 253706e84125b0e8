"""Lazy public names for a package (PEP 562), so that importing it costs nothing until a name is used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(
    package: str, exports: Mapping[str, Sequence[str]], elsewhere: Mapping[str, Sequence[str]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a package whose names are imported on first use.

    Args:
        package: the package's `__name__`.
        exports: submodule (relative, without the dot) to the public names that it defines.
        elsewhere: other package to the names of its that this one offers too.

    A name is imported once and then lies in the package's namespace, so later reads cost a plain attribute.
    """
    owner = {name: f"{package}.{module}" for module, names in exports.items() for name in names}
    owner |= {name: module for module, names in (elsewhere or {}).items() for name in names}

    def __getattr__(name: str) -> Any:  # noqa: N807
        module = owner.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:  # noqa: N807
        return sorted({*owner, *vars(sys.modules[package])})

    return __getattr__, __dir__, list(owner)
