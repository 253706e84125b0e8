"""``tools/dev engines``: the tests that need large libraries, each group of them in an environment of its own.

An environment, ``.cache/engines/NAME``, has a package's wheel and those of the siblings it declares, the pins of its
dependencies with all extras, the test runner, and torch by the links of ``tools/dev isolated``. It is made anew when
its pins or torch change; the wheels are built and installed every time. ``.venv`` never sees these libraries.

Ray's, for the cluster tier, is ``.venv`` with Ray on top.

Runs inside ``.venv``: it needs ``packaging``.
"""

from __future__ import annotations

import time
from pathlib import Path

from devtool.isolated import build_wheels, install_wheels, link_torch, shared_lines, site_packages
from devtool.paths import CACHE, PYTHON, run, say
from devtool.side_environments import TEST_GROUP, side_environment
from devtool.tests import pytest_command, test_environment

FOLDER = CACHE / "engines"
PACKAGES = ["accel-tracking"]
"""The packages with tests of the engines tier; each has its extras' libraries in one environment."""


def run_engines(names: list[str], pytest_arguments: list[str]) -> int:
    """Run the engines tier of the named packages, all by default; returns 1 when one failed."""
    chosen = [package for package in PACKAGES if not names or package in names]
    wheels, torch = build_wheels(), link_torch()
    failed = False
    for package in chosen:
        start = time.monotonic()
        python = make_environment(package, torch)
        install_wheels(package, wheels, python)
        code = _test(package, python, pytest_arguments)
        print(
            f"engines {package:<16} {'ok' if code == 0 else f'FAILED ({code})':<12} {time.monotonic() - start:5.1f} s"
        )
        failed |= code != 0
    return int(failed)


def make_environment(package: str, torch: Path) -> Path:
    """The interpreter of a package's environment."""
    return side_environment(
        FOLDER / package,
        shared_lines(torch),
        ("--package", package, "--all-extras"),
        TEST_GROUP,
        text=f"for {package} with all its extras (minutes, once)",
    )


def ray_environment() -> Path:
    """The interpreter of an environment that has all of ``.venv``, and Ray."""
    return side_environment(
        FOLDER / "ray",
        f"import site; site.addsitedir({str(site_packages(PYTHON))!r})\n",
        ("--package", "accel-launch", "--extra", "ray"),
        text="for Ray (once)",
    )


def _test(package: str, python: Path, pytest_arguments: list[str]) -> int:
    say(f"{package}: the engines tier")
    environment = {name: value for name, value in test_environment(["engines"]).items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{python.parent}:{environment.get('PATH', '')}"
    command = [python.parent / "pytest", *pytest_command()[1:], "-m", "engines", f"packages/{package}/tests"]
    return run([*command, *pytest_arguments], env=environment)
