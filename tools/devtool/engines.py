"""``tools/dev engines``: the tests that need large libraries, each group of them in an environment of its own.

An environment, ``.cache/engines/NAME``, has a package's wheel and those of the siblings it declares, the pins of its
dependencies with all extras, the test runner, and torch by the links of ``tools/dev isolated``. It is made anew when
its pins or torch change; the wheels are built and installed every time. ``.venv`` never sees these libraries.

Ray's, for the cluster tier, is ``.venv`` with Ray on top.

Runs inside ``.venv``: it needs ``packaging``.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from devtool.environment import UV, export_pins, install_pins, installer_environment
from devtool.isolated import build_wheels, install_wheels, link_torch, share, site_packages
from devtool.paths import CACHE, PYTHON, ROOT, must_run, run, say
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
    """The interpreter of a package's environment, made when it is missing or out of date."""
    folder = FOLDER / package
    python, stamp = folder / "bin" / "python", folder / "stamp.json"
    pins = [
        export_pins(FOLDER / f"{package}.txt", "--package", package, "--all-extras"),
        export_pins(FOLDER / "test.txt", "--package", "accel-workspace", "--only-group", "test"),
    ]
    text = _fingerprint(pins, torch)
    if not stamp.exists() or stamp.read_text() != text:
        say(f"{package}: making {folder.relative_to(ROOT)} with all its extras (minutes, once)")
        _install(folder, pins)
        share(torch, python)
        stamp.write_text(text)
    return python


def ray_environment() -> Path:
    """The interpreter of an environment that has all of ``.venv``, and Ray; made when it is missing or out of date."""
    folder = FOLDER / "ray"
    python, stamp = folder / "bin" / "python", folder / "stamp.json"
    pins = [export_pins(FOLDER / "ray.txt", "--package", "accel-launch", "--extra", "ray")]
    text = _fingerprint(pins, PYTHON)
    if not stamp.exists() or stamp.read_text() != text:
        say(f"making {folder.relative_to(ROOT)} (once)")
        _install(folder, pins)
        below = site_packages(PYTHON)
        (site_packages(python) / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
        stamp.write_text(text)
    return python


def _fingerprint(pins: list[Path], below: Path) -> str:
    return json.dumps({"pins": [hashlib.sha256(path.read_bytes()).hexdigest() for path in pins], "below": str(below)})


def _install(folder: Path, pins: list[Path]) -> None:
    command = [UV, "venv", "--quiet", "--clear", "--no-config", "--python", PYTHON, folder]
    must_run(command, env=installer_environment())
    for requirements in pins:
        install_pins(folder / "bin" / "python", requirements)


def _test(package: str, python: Path, pytest_arguments: list[str]) -> int:
    say(f"{package}: the engines tier")
    environment = {name: value for name, value in test_environment(["engines"]).items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{python.parent}:{environment.get('PATH', '')}"
    command = [python.parent / "pytest", *pytest_command()[1:], "-m", "engines", f"packages/{package}/tests"]
    return run([*command, *pytest_arguments], env=environment)
