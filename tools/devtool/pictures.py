"""``tools/dev docs --write``: the pictures of the documentation, drawn as SVG from texts.

A text in ``docs/pictures`` has three kinds of lines, beside empty ones and comments:

    row a b              boxes side by side, rows from top to bottom
    a: Title / more      what stands in a box, lines divided by " / "
    a -> b: label        an arrow, with words beside it or without

The picture of the packages has no text: it follows from their ``pyproject.toml`` files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from devtool.paths import ROOT, packages, pyproject

FOLDER = ROOT / "docs" / "pictures"
CHARACTER, LINE, PADDING, GAP, BETWEEN = 6.9, 17, 12, 28, 58  # pixels: per letter, per line, around text, around boxes
STYLE = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328;text-anchor:middle}.title{font-weight:bold}"
    ".label{fill:#57606a}rect.box{fill:#f6f8fa;stroke:#57606a}line{stroke:#57606a}"
)


@dataclass
class Picture:
    """Boxes in rows, and arrows between them."""

    rows: list[list[str]] = field(default_factory=list)
    boxes: dict[str, list[str]] = field(default_factory=dict)
    arrows: list[tuple[str, str, str]] = field(default_factory=list)


def pictures() -> dict[Path, str]:
    """The path and the content of every picture."""
    made = {path.with_suffix(".svg"): draw(parse(path.read_text(), path.name)) for path in FOLDER.glob("*.txt")}
    return {FOLDER / "packages.svg": draw(package_graph()), **made}


def stale_pictures() -> list[str]:
    """The pictures that are missing or not what their text gives, and those that nothing gives."""
    made = pictures()
    stale = [path for path, svg in made.items() if not path.exists() or path.read_text() != svg]
    return [str(path.relative_to(ROOT)) for path in [*sorted(stale), *sorted(set(FOLDER.glob("*.svg")) - set(made))]]


def write_pictures() -> None:
    """Write every picture, and remove those that nothing gives."""
    made = pictures()
    for path in set(FOLDER.glob("*.svg")) - set(made):
        path.unlink()
    for path, svg in made.items():
        path.write_text(svg)


def package_graph() -> Picture:
    """The packages of the workspace and torch: an arrow means "needs", and those that others imply are left out."""
    needs = {package: _needs(package) for package in packages()} | {"torch": set()}
    rows: dict[int, list[str]] = {}
    for package in needs:
        rows.setdefault(_depth(package, needs), []).append(package)
    boxes = {package: [package] for package in needs}
    implied = {(a, c) for a in needs for b in needs[a] for c in _reachable(b, needs)}
    arrows = [(a, b, "") for a in needs for b in sorted(needs[a]) if (a, b) not in implied]
    return Picture([rows[depth] for depth in sorted(rows, reverse=True)], boxes, arrows)


def _needs(package: str) -> set[str]:
    names = {re.split(r"[^\w-]", text, maxsplit=1)[0] for text in pyproject(package)["project"]["dependencies"]}
    return names & {*packages(), "torch"}


def _depth(package: str, needs: Mapping[str, Iterable[str]]) -> int:
    return 1 + max((_depth(other, needs) for other in needs[package]), default=-1)


def _reachable(package: str, needs: Mapping[str, Iterable[str]]) -> set[str]:
    return {other for direct in needs[package] for other in {direct, *_reachable(direct, needs)}}


def parse(text: str, name: str) -> Picture:
    """A picture's text.

    Raises:
        ValueError: a line of no known kind, or a name without a box or a row; says which.
    """
    picture = Picture()
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if arrow := re.fullmatch(r"(\w+) -> (\w+)(?:: (.+))?", line):
            picture.arrows.append((arrow[1], arrow[2], arrow[3] or ""))
        elif line.startswith("row "):
            picture.rows.append(line.split()[1:])
        elif box := re.fullmatch(r"(\w+): (.+)", line):
            picture.boxes[box[1]] = box[2].split(" / ")
        else:
            raise ValueError(f"{name}:{number}: neither a row, nor a box, nor an arrow: {line}")
    placed = {box for row in picture.rows for box in row}
    used = placed | {box for a, b, _ in picture.arrows for box in (a, b)}
    lost = sorted((used - picture.boxes.keys()) | (picture.boxes.keys() - placed))
    if lost:
        raise ValueError(f"{name}: each name needs a row and a box, which is not so for: {', '.join(lost)}")
    return picture


@dataclass(frozen=True)
class _Box:
    x: float  # of the middle
    y: float  # of the upper edge
    width: float
    height: float


def draw(picture: Picture) -> str:
    """The picture as SVG."""
    places, width, height = _layout(picture)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#57606a"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for start, end, label in picture.arrows:
        parts += _arrow(places[start], places[end], label)
    for name, lines in picture.boxes.items():
        parts += _box(places[name], lines)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _layout(picture: Picture) -> tuple[dict[str, _Box], float, float]:
    sizes = {
        name: (max(map(len, lines)) * CHARACTER + 2 * PADDING, len(lines) * LINE + 2 * PADDING)
        for name, lines in picture.boxes.items()
    }
    widths = [sum(sizes[name][0] for name in row) + GAP * (len(row) + 1) for row in picture.rows]
    places: dict[str, _Box] = {}
    y = float(GAP)
    for row, used in zip(picture.rows, widths, strict=True):
        x = (max(widths) - used) / 2 + GAP
        tallest = max(sizes[name][1] for name in row)
        for name in row:
            width, height = sizes[name]
            places[name] = _Box(x + width / 2, y + (tallest - height) / 2, width, height)
            x += width + GAP
        y += tallest + BETWEEN
    return places, max(widths), y - BETWEEN + GAP


def _box(place: _Box, lines: Sequence[str]) -> list[str]:
    left = place.x - place.width / 2
    parts = [
        f'<rect class="box" x="{left:.1f}" y="{place.y:.1f}" width="{place.width:.1f}" height="{place.height:.1f}" '
        'rx="5"/>'
    ]
    for number, line in enumerate(lines):
        kind = ' class="title"' if number == 0 else ""
        y = place.y + PADDING + LINE * (number + 0.75)
        parts.append(f'<text{kind} x="{place.x:.1f}" y="{y:.1f}">{escape(line)}</text>')
    return parts


def _arrow(start: _Box, end: _Box, label: str) -> list[str]:
    if start.y + start.height <= end.y:  # down
        x1, y1, x2, y2 = start.x, start.y + start.height, end.x, end.y
    elif end.y + end.height <= start.y:  # up
        x1, y1, x2, y2 = start.x, start.y, end.x, end.y + end.height
    else:  # beside
        side = 1 if end.x > start.x else -1
        x1, x2 = start.x + side * start.width / 2, end.x - side * end.width / 2
        y1 = y2 = (max(start.y, end.y) + min(start.y + start.height, end.y + end.height)) / 2
    parts = [f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" marker-end="url(#head)"/>']
    if label:
        x = (x1 + x2) / 2 + len(label) * CHARACTER / 2 + 6
        parts.append(f'<text class="label" x="{x:.1f}" y="{(y1 + y2) / 2 + 4:.1f}">{escape(label)}</text>')
    return parts
