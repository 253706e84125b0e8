"""What no committed file may hold, and what every package has to have."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from devtool import lock
from devtool.paths import ROOT, import_name, packages

# Put together from pieces, so that this file does not hold what it looks for.
HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("files", "python" + "hosted", "org"),
        ("registry", "npmjs", "org"),
        ("download", "pytorch", "org"),
        ("conda", "anaconda", "org"),
        ("deb", "debian", "org"),
        ("proxy", "golang", "org"),
    )
]
PATHS = [
    "/".join(("", *parts))
    for parts in (
        ("work", "main"),
        ("work", "shared"),
        ("root", ""),
        ("opt", "wheels"),
        ("opt", "pypi"),
        ("tmp", "setup"),
        ("tmp", "peerenv"),
    )
]
FORBIDDEN = re.compile("|".join(rf"(?<![\w.-]){re.escape(needle)}" for needle in HOSTS + PATHS))


def committed_texts() -> Iterator[tuple[Path, str]]:
    """The files under version control that are text."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.is_file():
            data = path.read_bytes()
            if b"\0" not in data:
                yield path, data.decode()


def test_no_committed_file_names_a_registry_host_or_a_machines_path() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for path, text in committed_texts()
        for match in FORBIDDEN.finditer(text)
    ]
    assert found == []


@pytest.mark.parametrize("needle", HOSTS + PATHS)
def test_the_search_would_find_it(needle: str) -> None:
    assert FORBIDDEN.search(f"see https://{needle}/x" if needle in HOSTS else f'"{needle}/x"')


def test_the_lock_names_files_and_hashes_but_no_address_and_no_torch_to_install() -> None:
    text = lock.LOCK.read_text()
    assert "://" not in text
    assert lock.without_hosts(text) == text
    assert re.search(r'\{ name = "torch"(?!, (specifier|marker = "sys_platform == \'never\'"))', text) is None


def test_hosts_are_taken_out_of_a_lock() -> None:
    text = (
        'source = { registry = "https://a.example/simple" }\n{ url = "https://b.example/p/x-1.whl", hash = "sha256:0" }'
    )
    expected = 'source = { registry = "wheelhouse" }\n{ path = "x-1.whl", hash = "sha256:0" }'
    assert lock.without_hosts(text) == expected


@pytest.mark.parametrize("package", packages())
def test_a_package_is_documented_typed_and_tested(package: str) -> None:
    folder = ROOT / "packages" / package
    assert f"# {package}" in (folder / "README.md").read_text()
    assert "```python" in (folder / "README.md").read_text(), "the README shows how to use the package alone"
    assert (folder / "src" / import_name(package) / "py.typed").is_file()
    assert list((folder / "tests").glob("test_*.py"))


def test_the_top_of_the_tree_stays_empty() -> None:
    listed = subprocess.run(
        ["git", "ls-tree", "--name-only", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    allowed = {"LICENSE", "README.md", "pyproject.toml", "uv.lock", "docs", "integration-tests", "packages", "tools"}
    assert {name for name in listed.stdout.split() if not name.startswith(".")} <= allowed
