"""README and documentation: links lead somewhere, code blocks run."""

import subprocess
import sys
from pathlib import Path

import pytest
from devtool import docs
from devtool.paths import ROOT

README = ROOT / "README.md"
RUN = (README, ROOT / "docs" / "CONTRIBUTING.md")


def python_blocks(page: Path) -> list[str]:
    return [code for _line, language, code in docs.code_blocks(page.read_text()) if language == "python"]


def test_the_readme_is_short_and_names_the_two_commands() -> None:
    text = README.read_text()
    assert len(text.splitlines()) < 120
    assert "tools/dev demo" in text
    assert "tools/dev test" in text


@pytest.mark.parametrize(
    ("page", "number"), [(page.name, number) for page in RUN for number in range(len(python_blocks(page)))]
)
def test_a_block_runs_on_its_own(page: str, number: int, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(python_blocks(next(path for path in RUN if path.name == page))[number])
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{script.read_text()}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_they_have_code(page: Path) -> None:
    assert python_blocks(page)


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
