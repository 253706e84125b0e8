"""README and documentation: links lead somewhere, code blocks run."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from devtool import docs
from devtool.paths import ROOT

README = ROOT / "README.md"
RUN_HERE = ["README.md", "docs/CONTRIBUTING.md", "docs/migrating.md", "docs/architecture.md"]
"""Pages whose blocks are run here, each on its own; those of the packages' pages run in their tests."""


def python_blocks(page: Path) -> list[str]:
    return [code for _line, language, code in docs.code_blocks(page.read_text()) if language == "python"]


def test_the_readme_is_short_and_names_the_two_commands() -> None:
    text = README.read_text()
    assert len(text.splitlines()) < 120
    assert "tools/dev demo" in text
    assert "tools/dev test" in text


@pytest.mark.parametrize(
    ("page", "number"), [(page, number) for page in RUN_HERE for number in range(len(python_blocks(ROOT / page)))]
)
def test_a_block_runs_on_its_own(page: str, number: int, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(python_blocks(ROOT / page)[number])
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{script.read_text()}\n{done.stdout}{done.stderr}"


def files_of_tests(top: str) -> Iterator[Path]:
    return (ROOT / top).rglob("test_*.py")


@pytest.mark.parametrize("page", RUN_HERE)
def test_a_page_that_is_run_has_code(page: str) -> None:
    assert python_blocks(ROOT / page)


def test_every_block_of_ours_is_run_somewhere() -> None:
    """Blocks of pages in `docs` are marked `py` where they are not ours to run."""
    pages = [page for page in docs.find_pages() if page.is_relative_to(ROOT / "docs") and python_blocks(page)]
    tests = "".join(path.read_text() for top in ("integration-tests", "packages") for path in files_of_tests(top))
    assert [page.name for page in pages if page.name not in tests] == []


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = 0
    for line in text.splitlines():
        of_a_package = r"`(accel[\w-]*)`: ((?:`[\w/.]+`(?:, | and )?)+)"
        places = re.findall(of_a_package + r"|packages/([\w-]+)/README.*\| (`.*`) \|$", line)
        for package, files, other, others in places:
            source = ROOT / "packages" / (package or other) / "src" / (package or other).replace("-", "_")
            for file in re.findall(r"`([\w/]+(?:\.\w+|/))`", files or others):
                named += 1
                assert (source / file).exists(), f"{line}: {source / file}"
    assert named > 40


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in docs.find_pages()])
def test_a_page_has_no_dead_link_and_no_broken_block(page: str) -> None:
    assert list(docs.problems_of(ROOT / page)) == []


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# A `code` title\n\n## Twice\n\n## Twice\n")
    return tmp_path / "page.md"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[x](gone.md)", "page.md:1: the link to gone.md leads nowhere"),
        ("\n[x](other.md#nowhere)", "page.md:2: other.md has no heading #nowhere"),
        ("[x](../../etc/passwd)", "page.md:1: the link to ../../etc/passwd leads nowhere"),
        ("```python\nx = (\n```", "page.md:2: this Python block does not parse: '(' was never closed"),
    ],
)
def test_problems_are_found_with_their_line(page: Path, text: str, problem: str) -> None:
    page.write_text(text + "\n")
    assert list(docs.problems_of(page)) == [problem]


@pytest.mark.parametrize(
    "text",
    [
        "[x](other.md#a-code-title) [y](other.md#twice-1) [z](https://example.org/x)",
        "# Here\n[x](#here)",
        "`[x](gone.md)`",
        "```text\n[x](gone.md)\n```",
    ],
)
def test_good_pages_have_none(page: Path, text: str) -> None:
    page.write_text(text + "\n")
    assert list(docs.problems_of(page)) == []
