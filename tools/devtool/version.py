"""``tools/dev version``: one version for all packages, and the ranges in which they ask for each other."""

from __future__ import annotations

import re

from devtool.paths import ROOT, DevError, packages, pyproject

UMBRELLA = "accel"
BOTTOM = "accel-state"


def read() -> str:
    """The version that the workspace and all members carry.

    Raises:
        DevError: they do not agree.
    """
    found = {package: pyproject(package)["project"]["version"] for package in packages()}
    found["the workspace"] = pyproject()["project"]["version"]
    if len(set(found.values())) != 1:
        listed = "\n".join(f"  {name}: {version}" for name, version in found.items())
        raise DevError(f"the versions do not agree; `tools/dev version X.Y.Z` writes one everywhere:\n{listed}")
    return str(found["the workspace"])


def state_range(version: str) -> str:
    """The range of accel-state that a member of this version asks for."""
    major, minor, _patch = version.split(".")
    return f">={major}.{minor}.0,<{major}.{int(minor) + 1}"


def write(version: str) -> None:
    """Write a version into every ``pyproject.toml``, with the requirements between the packages that follow from it."""
    if re.fullmatch(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)", version) is None:
        raise DevError(f"{version!r} is not a version of the form X.Y.Z, such as 0.2.0")
    for package in [None, *packages()]:
        path = (ROOT / "packages" / package if package else ROOT) / "pyproject.toml"
        path.write_text(rewritten(path.read_text(), version, is_umbrella=package == UMBRELLA))


def rewritten(text: str, version: str, *, is_umbrella: bool) -> str:
    """The text of a ``pyproject.toml`` with its own version and its requirements on sibling packages changed."""
    text = re.sub(r'^version = "[^"]*"', f'version = "{version}"', text, count=1, flags=re.MULTILINE)
    members = "|".join(re.escape(name) for name in packages() if name != UMBRELLA)
    wanted = f"=={version}" if is_umbrella else state_range(version)
    return re.sub(rf'"((?:{members})(?:\[[^\]]*\])?)(?:==|>=)[^"]*"', rf'"\g<1>{wanted}"', text)
