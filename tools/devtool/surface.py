"""``tools/dev surface``: the public API of each package, as a text that a reviewer can read.

``docs/reference/surface/<package>.json`` holds the names of ``__all__`` with parameters and defaults, the public
members of classes, and, for the launcher, every command's flags. A test compares it with the code; whoever changes the
surface writes it anew and sees the change in review. Annotations are left out: their form differs between releases.

Runs inside ``.venv``: it imports the packages.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import enum
import importlib
import importlib.metadata
import inspect
import json
import re
from pathlib import Path
from typing import Any

from devtool.paths import ROOT, import_name, packages

FOLDER = ROOT / "docs" / "reference" / "surface"
Described = str | list[str] | dict[str, Any]


def run_surface(*, check: bool) -> int:
    """Show what changed and write the snapshots; with ``check`` write nothing, and return 1 when something changed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    changed = 0
    for package in packages():
        difference = compare(package)
        if difference:
            changed += 1
            print("\n".join(difference))
            if not check:
                (FOLDER / f"{package}.json").write_text(snapshot(package))
    stale = [path for path in FOLDER.glob("*.json") if path.stem not in packages()]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: there is no such package")
        if not check:
            path.unlink()
    print(f"{len(packages())} packages, {changed + len(stale)} snapshot(s) {'differ' if check else 'written'}")
    return int(check and bool(changed or stale))


def compare(package: str) -> list[str]:
    """The lines of a unified diff between the committed snapshot and the code; empty when they agree."""
    path = FOLDER / f"{package}.json"
    committed = path.read_text() if path.exists() else ""
    name = str(path.relative_to(ROOT))
    lines = difflib.unified_diff(committed.splitlines(), snapshot(package).splitlines(), name, "the code", lineterm="")
    return list(lines)


def snapshot(package: str) -> str:
    """The public API of a package as JSON, one parameter a line."""
    module = importlib.import_module(import_name(package))
    described: dict[str, Any] = {"names": {name: describe(getattr(module, name)) for name in sorted(module.__all__)}}
    scripts = {script.name: script.value for script in entry_points(package, "console_scripts")}
    if scripts:
        described["scripts"] = scripts
    commands = {point.name: flags_of(point) for point in entry_points(package, "accel.commands")}
    if commands:
        described["commands"] = commands
    return json.dumps(described, indent=1) + "\n"


def entry_points(package: str, group: str) -> list[importlib.metadata.EntryPoint]:
    """A distribution's entry points in a group, by name."""
    points = importlib.metadata.distribution(package).entry_points
    return sorted((point for point in points if point.group == group), key=lambda point: point.name)


def describe(value: Any) -> Described:
    """A class, a function or a value in words."""
    if inspect.isclass(value):
        return _describe_class(value)
    if callable(value):
        return parameters_of(value)
    if inspect.ismodule(value):
        return f"module {value.__name__}"
    return f"value {_text(value)}"


def parameters_of(function: Any) -> list[str]:
    """One line for each parameter: ``name``, ``name=default``, ``*, name``, ``*name``, ``**name``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not tell
        return ["..."]
    lines = []
    for parameter in parameters:
        stars: dict[Any, str] = {
            parameter.VAR_POSITIONAL: "*",
            parameter.VAR_KEYWORD: "**",
            parameter.KEYWORD_ONLY: "*, ",
        }
        default = "" if parameter.default is parameter.empty else f"={_text(parameter.default)}"
        end = ", /" if parameter.kind is parameter.POSITIONAL_ONLY else ""
        lines.append(f"{stars.get(parameter.kind, '')}{parameter.name}{default}{end}")
    return lines


def flags_of(point: importlib.metadata.EntryPoint) -> dict[str, str]:
    """The options and arguments of a command, from the parser that it registers."""
    parser = argparse.ArgumentParser()
    point.load()(parser.add_subparsers())
    return _flags(parser)


def _flags(parser: argparse.ArgumentParser) -> dict[str, str]:
    found: dict[str, str] = {}
    for action in parser._actions:  # noqa: SLF001  argparse has no public way to list them
        if isinstance(action, argparse._HelpAction):  # noqa: SLF001
            continue
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for name, child in action.choices.items():
                found.update({f"{name} {flag}": text for flag, text in _flags(child).items()})
            continue
        words = [f"default {_text(action.default)}"]
        if action.choices is not None:
            words.append(f"one of {', '.join(map(str, action.choices))}")
        if action.nargs is not None:
            words.append(f"nargs {action.nargs}")
        found[" ".join(action.option_strings) or action.dest] = "; ".join(words)
    return found


def _describe_class(cls: type[Any]) -> dict[str, Any]:
    described: dict[str, Any] = {"bases": [base.__name__ for base in cls.__bases__ if base is not object]}
    if issubclass(cls, enum.Enum):
        described["members"] = {name: _text(member.value) for name, member in cls.__members__.items()}
        return described
    described["()"] = parameters_of(cls)
    if dataclasses.is_dataclass(cls):
        described["frozen"] = cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    for name in sorted(_own_names(cls)):
        member = inspect.getattr_static(cls, name)
        if isinstance(member, staticmethod | classmethod):
            described[name] = parameters_of(getattr(cls, name))
        elif inspect.isfunction(member):
            described[name] = parameters_of(member)[1:]  # without self
        elif isinstance(member, property):
            described[name] = "property" if member.fset is None else "property, can be set"
    return described


def _own_names(cls: type[Any]) -> set[str]:
    """Public attributes that a class or one of its bases here defines, not those of torch or Python."""
    ours = {import_name(package) for package in packages()}
    return {
        name for base in cls.__mro__ if base.__module__.split(".")[0] in ours for name in vars(base) if name[0] != "_"
    }


def _text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value)
    if inspect.isclass(value) or inspect.isfunction(value):
        return f"{value.__module__}.{value.__qualname__}"
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    return text.replace(str(Path.home()), "~")  # the snapshot says the same on every machine
