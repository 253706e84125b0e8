"""Who imports what, beyond the contracts that import-linter checks (``tools/dev lint``)."""

import ast
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from devtool.paths import ROOT, import_name, packages, pyproject
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OURS = {import_name(package) for package in packages()}


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every absolute import as a dotted name, ``from a import b`` as ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def private_imports(source: str, owner: str | None) -> list[tuple[int, str]]:
    """Imports of something private from a package of ours that is not ``owner``."""
    return [
        (line, name)
        for line, name in imported_names(ast.parse(source))
        if name.split(".")[0] in OURS - {owner} and any(part[0] == "_" for part in name.split(".")[1:])
    ]


@pytest.mark.parametrize("package", packages())
def test_no_package_imports_something_private_of_another(package: str) -> None:
    source = ROOT / "packages" / package / "src"
    found = {
        str(path.relative_to(ROOT)): private
        for path in source.rglob("*.py")
        if (private := private_imports(path.read_text(), import_name(package)))
    }
    assert found == {}


@pytest.mark.parametrize("folder", ["docs/examples", "tools/bench", "tools/testkit"])
def test_users_code_imports_nothing_private(folder: str) -> None:
    found = [str(path) for path in (ROOT / folder).rglob("*.py") if private_imports(path.read_text(), None)]
    assert found == []


def undeclared_imports(source: str, owner: str, declared: set[str]) -> list[tuple[int, str]]:
    """Imports at module level of something that is neither Python's, nor the package's own, nor declared."""
    known = {*sys.stdlib_module_names, owner, *declared}
    top_level = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return [
        (line, name)
        for node in top_level
        for line, name in imported_names(ast.Module([node], []))
        if name.split(".")[0] not in known
    ]


@pytest.mark.parametrize("package", packages())
def test_what_a_package_imports_at_once_it_declares(package: str) -> None:
    project = pyproject(package)["project"]
    extras = chain.from_iterable(project.get("optional-dependencies", {}).values())
    distributions = {canonicalize_name(Requirement(text).name) for text in [*project["dependencies"], *extras]}
    providers = importlib.metadata.packages_distributions()
    declared = {name for name, owners in providers.items() if distributions & set(map(canonicalize_name, owners))}
    # members, and extras that are not installed here, by their own names
    declared |= {import_name(name) for name in distributions}
    source = ROOT / "packages" / package / "src" / import_name(package)
    found = {
        str(path.relative_to(source)): undeclared
        for path in source.rglob("*.py")
        if "_alias" not in path.parts
        and (undeclared := undeclared_imports(path.read_text(), import_name(package), declared))
    }
    assert found == {}


def test_an_undeclared_import_would_be_seen() -> None:
    source = "import os\nimport yaml\nimport torch.nn\nfrom accel_data.x import y\ndef f():\n    import numpy\n"
    assert undeclared_imports(source, "accel_data", {"torch"}) == [(2, "yaml")]


def test_a_private_import_would_be_seen() -> None:
    source = "from accel_state._x import y\nimport accel_data.z\nfrom accel_ckpt import _w\nfrom accel._v import u\n"
    assert private_imports(source, "accel") == [(1, "accel_state._x.y"), (3, "accel_ckpt._w")]


@pytest.mark.parametrize("package", packages())
def test_importing_a_package_does_not_import_torch(package: str, tmp_path: Path) -> None:
    code = f"import {import_name(package)}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"], ["env", "--help"]])
def test_the_command_lines_help_does_not_import_torch(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from accel_launch.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "usage: accel" in done.stdout
