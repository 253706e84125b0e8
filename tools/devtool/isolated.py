"""``tools/dev isolated``: each package's tests against its built wheel, with only what it declares.

One environment per package under ``.cache/isolated``: the wheel, those of the siblings it declares, the pins of its
declared dependencies with all extras but those of the engines tier, the test runner, ``tools/testkit``, and torch.
Torch comes from one shared folder of links to torch and its own dependencies in ``.venv``, put on the path last:
nothing else of ``.venv`` is visible.

Runs inside ``.venv``: it needs ``packaging``.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import time
from pathlib import Path

from packaging.requirements import Requirement

from devtool.environment import TESTKIT, UV, export_pins, install_pins, installer_environment, light_extras
from devtool.paths import CACHE, PYTHON, ROOT, DevError, import_name, must_run, output_of, packages, pyproject, run, say
from devtool.tests import pytest_command, test_environment

FOLDER = CACHE / "isolated"
WHEELS = FOLDER / "wheels"


def run_isolated(names: list[str], pytest_arguments: list[str]) -> int:
    """Build all wheels, then test the named packages one by one; returns 1 when one failed."""
    wheels = build_wheels()
    torch = link_torch()
    results: dict[str, tuple[int, float]] = {}
    for package in names:
        start = time.monotonic()
        python = make_environment(package, wheels, torch)
        check_environment(package, python)
        results[package] = (_test(package, python, pytest_arguments), time.monotonic() - start)
    for package, (code, seconds) in results.items():
        print(f"isolated {package:<16} {'ok' if code == 0 else f'FAILED ({code})':<12} {seconds:5.1f} s")
    return int(any(code != 0 for code, _ in results.values()))


def build_wheels() -> dict[str, Path]:
    """Build the wheels of all members; returns them by package."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    command = [UV, "build", "--quiet", "--wheel", "--all-packages", "--no-build-isolation", "--python", PYTHON]
    must_run([*command, "--no-config", "--out-dir", WHEELS], env=installer_environment())
    return {package: next(WHEELS.glob(f"{import_name(package)}-*.whl")) for package in packages()}


def declared_members(package: str) -> list[str]:
    """A package and the members that it declares, directly or through one another."""
    found: list[str] = []
    waiting = [package]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.append(name)
            requirements = [Requirement(text).name for text in pyproject(name)["project"]["dependencies"]]
            waiting += [requirement for requirement in requirements if requirement in packages()]
    return found


def link_torch() -> Path:
    """A folder of links to torch and its dependencies, and to nothing else; made anew when torch changed.

    Its name tells hypothesis, which reads the constants of all code that is not installed, to leave torch's alone: a
    minute on a busy machine.
    """
    versions = {name: importlib.metadata.version(name) for name in closure("torch")}
    folder, stamp = FOLDER / "torch" / "site-packages", FOLDER / "torch.json"
    stamp_text = json.dumps({"python": str(PYTHON), **versions}, indent=1)
    if not folder.exists() or not stamp.exists() or stamp.read_text() != stamp_text:
        stamp.unlink(missing_ok=True)
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in versions:
            _link_distribution(importlib.metadata.distribution(name), folder)
        stamp.write_text(stamp_text)
    return folder


def closure(root: str) -> list[str]:
    """Names of an installed distribution and of all that it requires, extras included where they are asked for."""
    found: dict[tuple[str, str], str] = {}
    waiting = [(root, "")]
    while waiting:
        key = waiting.pop()
        name, extra = key
        if key in found:
            continue
        found[key] = name
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, asked) for asked in ("", *requirement.extras)]
    return sorted(set(found.values()))


def _link_distribution(distribution: importlib.metadata.Distribution, folder: Path) -> None:
    tops = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
    for top in tops:
        source = Path(str(distribution.locate_file(top))).resolve()
        if source.exists() and not (folder / top).exists():
            (folder / top).symlink_to(source)


def make_environment(package: str, wheels: dict[str, Path], torch: Path) -> Path:
    """An environment with a package's wheel and what it declares; its interpreter."""
    folder = FOLDER / package
    python = folder / "bin" / "python"
    pins = export_pins(FOLDER / f"{package}.txt", "--package", package, *light_extras(package))
    tools = export_pins(FOLDER / "test.txt", "--package", "accel-workspace", "--only-group", "test")
    say(f"{package}: making {folder.relative_to(ROOT)}")
    must_run([UV, "venv", "--quiet", "--clear", "--no-config", "--python", PYTHON, folder], env=installer_environment())
    for requirements in (pins, tools):
        install_pins(python, requirements)
    install_wheels(package, wheels, python)
    (site_packages(python) / "shared.pth").write_text(shared_lines(torch))
    return python


def install_wheels(package: str, wheels: dict[str, Path], python: Path) -> None:
    """Install the wheels of a package and of the members that it declares, in place of any that are there."""
    command = [UV, "pip", "install", "--quiet", "--no-config", "--python", python, "--no-deps", "--no-index"]
    command += ["--reinstall"]
    must_run([*command, *(wheels[name] for name in declared_members(package))], env=installer_environment())


def shared_lines(torch: Path) -> str:
    """What an environment's path has last, as lines of a ``.pth`` file: torch's links and the testkit."""
    return f"{torch}\n{TESTKIT / 'src'}\n"


def site_packages(python: Path) -> Path:
    """Where an interpreter's packages lie."""
    return Path(output_of([python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())


def check_environment(package: str, python: Path) -> None:
    """Raise ``DevError`` when a package does not come from its wheel, or can be imported without being declared."""
    code = "import json, sys; from importlib.util import find_spec as find; "
    code += "print(json.dumps({name: spec and spec.origin for name in sys.argv[1:] for spec in [find(name)]}))"
    names = [import_name(name) for name in packages()]
    origins = json.loads(output_of([python, "-I", "-c", code, *names]))
    declared = [import_name(name) for name in declared_members(package)]
    for name, origin in origins.items():
        if name not in declared and origin is not None:
            raise DevError(f"{package}: {name} can be imported from {origin}, but is not declared")
        if name in declared and (origin is None or not Path(origin).is_relative_to(FOLDER / package)):
            raise DevError(f"{package}: {name} should come from its wheel in .cache/isolated/{package}, is at {origin}")


def _test(package: str, python: Path, pytest_arguments: list[str]) -> int:
    say(f"{package}: testing its wheel")
    environment = {name: value for name, value in test_environment().items() if name != "PYTHONPATH"}
    bin_folder = python.parent
    environment["PATH"] = f"{bin_folder}:{environment.get('PATH', '')}"
    command = [bin_folder / "pytest", *pytest_command()[1:], f"packages/{package}/tests", *pytest_arguments]
    return run(command, env=environment)
