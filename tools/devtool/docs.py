"""``tools/dev docs``: links lead somewhere, code blocks are code, and pages made from code are up to date.

Blocks marked ``python`` are ours, and run in each page's test; those marked ``py`` are of others, or parts.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from devtool import pictures, reference
from devtool.paths import ROOT

LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
FENCE = re.compile(r"^(`{3,}|~{3,})\s*(\S*)[^\n]*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)


def run_docs(*, write: bool) -> int:
    """Check every page, with ``write`` after those made from code; prints what is wrong and returns 1 then."""
    if write:
        reference.write_pages()
        pictures.write_pictures()
    pages = list(find_pages())
    problems = [problem for page in pages for problem in problems_of(page)]
    problems += [f"{path} is not what the code gives: `tools/dev docs --write`" for path in stale()]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(pages)} pages, {len(problems)} problem(s)")
    return int(bool(problems))


def stale() -> list[str]:
    """Pages and pictures that are not what they are made from gives."""
    return [*reference.stale_pages(), *pictures.stale_pictures()]


def find_pages() -> Iterator[Path]:
    """The Markdown pages of the project, outside caches and environments."""
    yield from sorted(ROOT.glob("*.md"))
    for folder in ("docs", "packages", "integration-tests", "tools"):
        yield from sorted((ROOT / folder).rglob("*.md"))


def problems_of(page: Path) -> Iterator[str]:
    """What is wrong with one page, a line each."""
    text = page.read_text()
    where = page.relative_to(ROOT)
    for line, language, code in code_blocks(text):
        if language == "python":
            try:
                ast.parse(code)
            except SyntaxError as error:
                yield f"{where}:{line + (error.lineno or 1)}: this Python block does not parse: {error.msg}"
    prose = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in LINK.finditer(re.sub(r"`[^`\n]*`", lambda code: " " * len(code[0]), prose)):
        target = match[1]
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        line = prose.count("\n", 0, match.start()) + 1
        path, _, anchor = target.partition("#")
        file = (page.parent / unquote(path)).resolve() if path else page
        if not file.exists() or not file.is_relative_to(ROOT):
            yield f"{where}:{line}: the link to {target} leads nowhere"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
            yield f"{where}:{line}: {file.relative_to(ROOT)} has no heading #{anchor}"


def code_blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """The fenced blocks of a page: line of the opening fence, language, code."""
    for match in FENCE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[2], match[3]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", FENCE.sub("", text), flags=re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"`|\*", "", heading)).strip().lower().replace(" ", "-")
        count = 0
        name = slug
        while name in found:
            count += 1
            name = f"{slug}-{count}"
        found.add(name)
    return found
