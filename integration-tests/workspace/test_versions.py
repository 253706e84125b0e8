"""One version for all packages, in the sources and in the wheels that are built from them."""

import email
import os
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from devtool import environment, version
from devtool.paths import ROOT, DevError, import_name, packages, pyproject
from hatchling.build import build_wheel
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version


def siblings_of(requirements: list[str]) -> dict[str, SpecifierSet]:
    parsed = [Requirement(text) for text in requirements]
    return {found.name: found.specifier for found in parsed if found.name in packages() and found.marker is None}


def expected_siblings(package: str) -> dict[str, SpecifierSet]:
    """What a package has to ask of the others."""
    now = version.read()
    if package == version.UMBRELLA:
        return {name: SpecifierSet(f"=={now}") for name in packages() if name != package}
    return {} if package == version.BOTTOM else {version.BOTTOM: SpecifierSet(version.state_range(now))}


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Message]:
    """The METADATA of every package's wheel, built now."""
    out = tmp_path_factory.mktemp("wheels")
    found = {}
    before = Path.cwd()
    try:
        for package in packages():
            os.chdir(ROOT / "packages" / package)
            with zipfile.ZipFile(out / build_wheel(str(out))) as wheel:
                metadata_file = f"{import_name(package)}-{version.read()}.dist-info/METADATA"
                found[package] = email.message_from_bytes(wheel.read(metadata_file))
    finally:
        os.chdir(before)
    return found


def test_the_eight_packages_and_the_workspace_agree() -> None:
    assert len(packages()) == 8
    assert version.read().count(".") == 2  # raises when they do not agree


@pytest.mark.parametrize("package", packages())
def test_sources_ask_for_their_siblings_in_the_agreed_range(package: str) -> None:
    project = pyproject(package)["project"]
    assert siblings_of(project["dependencies"]) == expected_siblings(package)


def test_wheels_carry_version_and_ranges(metadata: dict[str, Message]) -> None:
    for package, message in metadata.items():
        assert message["Name"] == package
        assert message["Version"] == version.read()
        assert siblings_of(message.get_all("Requires-Dist", [])) == expected_siblings(package), package


def test_wheels_say_what_they_run_on(metadata: dict[str, Message]) -> None:
    for package, message in metadata.items():
        assert SpecifierSet(message["Requires-Python"]) == SpecifierSet(">=3.11"), package
        assert message["License-Expression"] == "Apache-2.0", package


def test_writing_a_version_changes_it_and_the_ranges_and_nothing_else() -> None:
    text = 'version = "{}"\ndependencies = ["accel-state[testing]{}", "torch>=2.9"]\n[tool.x]\nversion = "7"\n'
    before, after = text.format("0.1.0", ">=0.1.0,<0.2"), text.format("0.3.2", ">=0.3.0,<0.4")
    assert version.rewritten(before, "0.3.2", is_umbrella=False) == after


def test_the_umbrella_pins_exactly() -> None:
    text = '"accel-data==0.1.0", "accel-tracking[tensorboard]", "tqdm>=4.66"'
    assert version.rewritten(text, "1.0.0", is_umbrella=True) == text.replace("0.1.0", "1.0.0")


@pytest.mark.parametrize("bad", ["1.0", "v1.0.0", "1.0.0rc1", "01.0.0", ""])
def test_a_version_of_another_form_is_refused_before_anything_is_written(bad: str) -> None:
    before = (ROOT / "pyproject.toml").read_text()
    with pytest.raises(DevError, match=r"of the form X\.Y\.Z"):
        version.write(bad)
    assert (ROOT / "pyproject.toml").read_text() == before


def test_the_matrix_claims_what_the_packages_ask_for_and_set_up_installs() -> None:
    combinations = tomllib.loads((ROOT / ".ci" / "matrix.toml").read_text())["combination"]
    oldest = min(combinations, key=lambda row: Version(row["torch"]))
    assert [row["torch"] for row in combinations if row["runs"]] == [environment.TORCH_VERSION]
    for package in packages():
        project = pyproject(package)["project"]
        assert project["requires-python"] == f">={min(row['python'] for row in combinations)}"
        asked = [Requirement(text) for text in project["dependencies"]]
        for torch in (found for found in asked if found.name == "torch"):
            assert all(Version(row["torch"]) in torch.specifier for row in combinations)
            assert str(torch.specifier) == f">={oldest['torch'].removesuffix('.0')}"
