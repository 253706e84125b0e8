"""What the modules of the alias are made of: names that are fetched from their owners on first use."""

from __future__ import annotations

import importlib
import opcode
import sys
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any

from accel.compat.table import Names, children, fetch, is_offered, places
from accel_state.errors import AliasError


def fill(namespace: dict[str, Any]) -> None:
    """Gives a module of the alias its names; called by the module itself, with its `globals()`.

    Run by `python -m`, it calls the module's `main`.
    """
    place = namespace["__spec__"].name
    names, modules = places()[place], children(place)
    namespace["__getattr__"], namespace["__dir__"] = lazy_names(place, namespace, names, modules)
    for name in modules:
        if name in names and is_offered(name, names[name]):
            # `accelerate.utils.tqdm` is a module and a function: importing the module now, and not some time later,
            # leaves the function in its place
            importlib.import_module(f"{place}.{name}")
            namespace[name] = fetch(name, names[name])
    parent, _, leaf = place.rpartition(".")
    if leaf in names and leaf in places().get(parent, {}):
        sys.modules[place].__class__ = _CallableModule
    if namespace["__name__"] == "__main__":
        sys.exit(fetch("main", names["main"])())


def lazy_names(
    module: str, namespace: dict[str, Any], names: Names, modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` (PEP 562) of a module whose names come from the table.

    Args:
        module: what error messages call it.
        namespace: where a fetched name is kept, so that it is fetched once.
        names: name to owner; `__all__` are those that are offered by now.
        modules: its submodules, which are imported as attributes.
    """

    def offered() -> list[str]:
        return [name for name, owner in names.items() if is_offered(name, owner)]

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name == "__all__":
            return offered()
        if name in names and is_offered(name, names[name]):
            namespace[name] = fetch(name, names[name])
            return namespace[name]
        if name in modules:
            return importlib.import_module(f"{module}.{name}")
        if name in names:
            package = names[name].partition(":")[0].partition(".")[0].replace("_", "-")
            message = f"accel does not offer {module}.{name} yet; it belongs to {package}"
            raise _not_offered(message, sys._getframe(1))  # noqa: SLF001
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def __dir__() -> list[str]:  # noqa: N807
        return sorted({*offered(), *modules, *namespace})

    return __getattr__, __dir__


def _not_offered(message: str, caller: FrameType) -> Exception:
    """The error for a missing name, of the type that reaches the user.

    `from module import name` turns an AttributeError into an ImportError with a message of its own, so there it is an
    ImportError right away; anywhere else only an AttributeError lets `hasattr` work.
    """
    instruction = caller.f_code.co_code[caller.f_lasti]
    return AliasError(message) if instruction == opcode.opmap["IMPORT_FROM"] else AttributeError(message)


class _CallableModule(ModuleType):
    """A module that stands where a function of the same name is expected."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)
