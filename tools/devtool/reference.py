"""``tools/dev docs --write``: a page per package, with a section for each public name from its docstring.

``docs/reference/<package>.md`` follows ``__all__``. ``tools/dev docs`` fails where a page is not what the code gives,
and where a name has no docstring. A constant's docstring is the string that stands below its assignment, or below a
run of assignments that it belongs to.

Runs inside ``.venv``: it imports the packages.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from devtool.paths import ROOT, import_name, packages, pyproject

FOLDER = ROOT / "docs" / "reference"
NOTE = "<!-- Made by `tools/dev docs --write` from the code. -->"
WIDTH = 110


class UndocumentedError(Exception):
    """Public names without a docstring; the message lists them."""


def pages() -> dict[Path, str]:
    """The path and the text of every page.

    Raises:
        UndocumentedError: names without a docstring.
    """
    missing: list[str] = []
    made = {FOLDER / f"{package}.md": package_page(package, missing) for package in packages()}
    if missing:
        raise UndocumentedError(f"no docstring says what these are: {', '.join(missing)}")
    return {FOLDER / "README.md": index_page(), **made}


def stale_pages() -> list[str]:
    """The pages that are missing or not what the code gives, and those that no package has."""
    made = pages()
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    return [str(path.relative_to(ROOT)) for path in [*stale, *sorted(set(FOLDER.glob("*.md")) - set(made))]]


def write_pages() -> None:
    """Write every page, and remove those that no package has."""
    made = pages()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in set(FOLDER.glob("*.md")) - set(made):
        path.unlink()
    for path, text in made.items():
        path.write_text(text)


# ------------------------------------------------------------------ pages


def index_page() -> str:
    """All names of all packages, in alphabetical order, each with a link to its section."""
    owners: dict[str, list[str]] = {}
    for package in packages():
        for name in public_names(package):
            if owner_of(package, name) == package:
                owners.setdefault(name, []).append(package)
    lines = [NOTE, "# Reference", "", "Every public name, by package:", ""]
    lines += [f"- [{package}]({package}.md): {pyproject(package)['project']['description']}" for package in packages()]
    lines += ["", f"Or by name, {len(owners)} of them:", ""]
    for name in sorted(owners, key=str.lower):
        links = ", ".join(f"[{package}]({package}.md#{name.lower()})" for package in owners[name])
        lines.append(f"- `{name}`: {links}")
    return "\n".join(lines) + "\n"


def package_page(package: str, missing: list[str]) -> str:
    """The page of a package; what has no docstring is added to ``missing``."""
    blocks = [f"{NOTE}\n# {package}", f"{pyproject(package)['project']['description']} What it is for, with examples: "]
    blocks[-1] += f"[its README](../../packages/{package}/README.md)."
    module = importlib.import_module(import_name(package))
    elsewhere = []
    for name in public_names(package):
        owner = owner_of(package, name)
        if owner == package:
            blocks.append("\n\n".join(section(package, name, getattr(module, name), missing)))
        else:
            elsewhere.append(f"- `{name}`: [{owner}]({owner}.md#{name.lower()})")
    if elsewhere:
        blocks.append("## Names of other packages\n\n" + "\n".join(elsewhere))
    if package == "accel":
        blocks.append("## accel.utils\n\n" + "\n".join(utils_lines()))
    return "\n\n".join(blocks) + "\n"


def utils_lines() -> Iterator[str]:
    """Where the names of ``accel.utils`` come from."""
    from accel.compat.table import places

    names = {
        name: owner[0]
        for place, entries in places().items()
        if f"{place}.".startswith("accelerate.utils.")
        for name, owner in entries.items()
    }
    public = {import_name(package): package for package in packages()}
    for name, module in sorted(names.items(), key=lambda item: item[0].lower()):
        package = public.get(module)
        if package is not None and name in public_names(package):
            yield f"- `{name}`: [{package}]({package}.md#{name.lower()})"
        else:
            yield f"- `{name}`: `{module}`"


def public_names(package: str) -> list[str]:
    """The package's ``__all__``, in alphabetical order."""
    names: list[str] = importlib.import_module(import_name(package)).__all__
    return sorted(names, key=str.lower)


def owner_of(package: str, name: str) -> str:
    """The package that defines a name: this one, or the one that it is passed on from."""
    for other in packages():
        if other not in (package, "accel") and package == "accel" and name in public_names(other):
            return other
    return package


# ------------------------------------------------------------------ one name


def section(package: str, name: str, value: Any, missing: list[str]) -> Iterator[str]:
    """The blocks of text about one public name."""
    yield f"## {name}"
    where = f"{package}: {name}"
    if inspect.isclass(value):
        yield from _about_class(package, name, value, where, missing)
    elif callable(value):
        yield code(signature_of(name, value))
        yield docstring(own_docstring(value), where, missing)
    else:
        yield code(f"{name} = {shortened(value)}")
        yield docstring(constant_docstring(package, name), where, missing)


def _about_class(package: str, name: str, cls: type[Any], where: str, missing: list[str]) -> Iterator[str]:
    bases = [base for base in cls.__bases__ if _is_told(base)]
    if issubclass(cls, enum.Enum):
        yield code("\n".join(f"{name}.{member.name} = {member.value!r}" for member in cls))
    else:
        yield code(signature_of(name, cls) if _is_made_by_us(cls) else f"class {name}")
    text = docstring(own_docstring(cls), where, missing)
    yield text + (f"\n\nBases: {', '.join(f'`{base.__name__}`' for base in bases)}" if bases else "")
    facts = []
    methods = []
    for member_name, member in members_of(package, cls):
        inner = f"{where}.{member_name}"
        if isinstance(member, property):
            if not _doc(cls, member_name) and re.search(rf"^ +{member_name}: ", cls.__doc__ or "", re.MULTILINE):
                continue  # told in the class's docstring
            facts.append(f"- `{member_name}`: {' '.join(docstring(_doc(cls, member_name), inner, missing).split())}")
        else:
            methods += [f"### {name}.{member_name}", code(signature_of(member_name, member))]
            methods.append(docstring(_doc(cls, member_name), inner, missing))
    if facts:
        yield "\n".join(facts)
    yield from methods


def members_of(package: str, cls: type[Any]) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, with those of bases that are not public themselves."""
    if issubclass(cls, enum.Enum):
        return
    ours = {import_name(each) for each in packages()}
    public = {getattr(importlib.import_module(import_name(package)), name) for name in _class_names(package)}
    seen: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] not in ours or (base is not cls and base in public):
            continue
        for name, member in vars(base).items():
            is_shown = inspect.isfunction(member) or isinstance(member, staticmethod | classmethod | property)
            if name[0] != "_" and is_shown and name not in seen:
                seen.add(name)
                yield name, member


def _is_made_by_us(cls: type[Any]) -> bool:
    """Whether its constructor is of these packages: how Python shows others, and protocols, differs by release."""
    ours = {import_name(each) for each in packages()}
    makers = (base for base in cls.__mro__ if {"__init__", "__new__"} & vars(base).keys())
    return next(makers).__module__.split(".")[0] in ours and not getattr(cls, "_is_protocol", False)


def _is_told(base: type[Any]) -> bool:
    if base is object or base.__module__ in ("enum", "typing"):
        return False
    ours = {import_name(each) for each in packages()}
    return base.__module__.split(".")[0] not in ours or any(base.__name__ in public_names(each) for each in packages())


@cache
def _class_names(package: str) -> tuple[str, ...]:
    module = importlib.import_module(import_name(package))
    return tuple(name for name in module.__all__ if inspect.isclass(getattr(module, name)))


def _doc(cls: type[Any], name: str) -> str | None:
    member = inspect.getattr_static(cls, name)
    return inspect.getdoc(member if isinstance(member, property) else getattr(cls, name))


def own_docstring(value: Any) -> str | None:
    """The docstring that somebody wrote: not a base's, nor the one that ``dataclass`` makes up."""
    text: str | None = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    if text is None or (inspect.isclass(value) and text.startswith(f"{value.__name__}(")):
        return None
    return inspect.cleandoc(text)


def constant_docstring(package: str, name: str) -> str | None:
    """The string below the assignment of a constant, somewhere in the package's source."""
    return _constants(package).get(name)


@cache
def _constants(package: str) -> dict[str, str]:
    found = {}
    for path in sorted((ROOT / "packages" / package / "src").rglob("*.py")):
        above: list[str] = []  # names assigned in the lines right above
        last_line = 0
        for statement in ast.parse(path.read_text()).body:
            if statement.lineno != last_line + 1:
                above = []
            last_line = statement.end_lineno or 0
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                above += [target.id for target in targets if isinstance(target, ast.Name)]
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                found.update(dict.fromkeys(above, inspect.cleandoc(str(statement.value.value))))
                above = []
    return found


# ------------------------------------------------------------------ text


def code(text: str) -> str:
    """A block of code that is not there to be run."""
    return f"```py\n{text}\n```"


def signature_of(name: str, value: Any) -> str:
    """A call in words: parameters with annotations as they were written and defaults, one a line where it is long."""
    is_bound = isinstance(value, classmethod)
    function: Callable[..., Any] = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a class of C that does not tell
        return f"{name}(...)"
    parameters = list(signature.parameters.values())
    if parameters and (is_bound or parameters[0].name == "self"):
        parameters = parameters[1:]
    parts: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        parts.append(_parameter(parameter))
    ending = "" if inspect.isclass(function) else _annotation(signature.return_annotation, " -> ")
    line = f"{name}({', '.join(parts)}){ending}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){ending}"


def _parameter(parameter: inspect.Parameter) -> str:
    kinds: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    stars = kinds.get(parameter.kind, "")
    annotation = _annotation(parameter.annotation, ": ")
    if parameter.default is parameter.empty:
        return f"{stars}{parameter.name}{annotation}"
    equals = " = " if annotation else "="
    return f"{stars}{parameter.name}{annotation}{equals}{shortened(parameter.default)}"


def _annotation(annotation: Any, before: str) -> str:
    """As it was written; one that Python has evaluated is left out, since its form differs between releases."""
    if isinstance(annotation, str):
        return before + annotation
    if isinstance(annotation, type) and annotation is not inspect.Parameter.empty:
        return before + annotation.__name__
    return ""


def shortened(value: Any) -> str:
    """A value as code, the same on every machine, and not too long."""
    if isinstance(value, enum.Enum):
        return str(value)
    if inspect.isclass(value) or inspect.isfunction(value):
        return value.__qualname__
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)).replace(str(Path.home()), "~")
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 4]} ..."


def docstring(text: str | None, where: str, missing: list[str]) -> str:
    """A docstring as Markdown; none at all is noted in ``missing``."""
    if not text:
        missing.append(where)
        return ""
    return "\n".join(_lines(text.splitlines())).strip()


def _lines(lines: list[str]) -> Iterator[str]:
    """Sections such as ``Args:`` become lists; all other lines stay."""
    heading = ""
    for line in lines:
        found = re.fullmatch(r"(Args|Attributes|Raises|Warns|Returns|Yields):", line)
        if found:
            heading = found[1]
            yield f"**{heading}**\n"
        elif not line:
            yield ""
        elif heading and not line.startswith(" "):
            heading = ""
            yield escaped(line)
        elif heading in ("Args", "Attributes", "Raises", "Warns") and re.match(r"    \S", line):
            names, colon, rest = line.strip().partition(": ")
            is_entry = bool(colon) and re.fullmatch(r"[\w*., ]+", names) is not None
            yield f"- `{names}`: {escaped(rest)}" if is_entry else f"  {escaped(line.strip())}"
        elif heading:
            yield f"  {escaped(line.strip())}" if heading not in ("Returns", "Yields") else escaped(line.strip())
        else:
            yield line if line.startswith("    ") else escaped(line)


def escaped(line: str) -> str:
    """Prose in which nothing is taken for markup; code in backticks stays as it is."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part[:1] == "`" else re.sub(r"([<*\[\]]|__)", r"\\\1", part) for part in parts)
