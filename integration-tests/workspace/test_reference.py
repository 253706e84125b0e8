"""Pages and pictures that are made from code: up to date, and what they should look like."""

import enum
from pathlib import Path
from types import SimpleNamespace

import pytest
from devtool import docs, pictures, reference
from devtool.paths import packages, pyproject


def test_what_is_made_from_code_is_up_to_date() -> None:
    assert docs.stale() == [], "run tools/dev docs --write"


def test_a_page_that_is_out_of_date_is_found_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reference, pictures):
        monkeypatch.setattr(module, "ROOT", tmp_path)
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(reference, "pages", lambda: {tmp_path / "a.md": "new"})
    monkeypatch.setattr(pictures, "package_graph", lambda: pictures.parse("row a\na: A", "a.txt"))
    (tmp_path / "a.md").write_text("old")
    (tmp_path / "gone.md").write_text("of a package that is no more")
    assert docs.stale() == ["a.md", "gone.md", "packages.svg"]
    reference.write_pages()
    pictures.write_pictures()
    assert docs.stale() == []
    assert not (tmp_path / "gone.md").exists()


class Colour(enum.Enum):
    """What light looks like."""

    RED = "red"


class Base:
    """What others build on."""

    def told(self) -> int:
        """The answer."""
        return 42


class Undocumented(Base):
    def told(self) -> int:
        return 43

    @property
    def silent(self) -> int:
        return 0


def section(name: str, value: object) -> tuple[str, list[str]]:
    missing: list[str] = []
    return "\n\n".join(reference.section("accel-state", name, value, missing)), missing


def test_an_enum_shows_its_members() -> None:
    text, missing = section("Colour", Colour)
    assert "Colour.RED = 'red'" in text
    assert "What light looks like." in text
    assert not missing


def test_a_class_that_python_makes_shows_no_arguments() -> None:
    class Wrong(ValueError):
        """Something else."""

    text, missing = section("Wrong", Wrong)
    assert text.startswith("## Wrong\n\n```py\nclass Wrong\n```\n\nSomething else.\n\nBases: `ValueError`")
    assert not missing


def test_a_name_without_a_docstring_of_its_own_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _, missing = section("Undocumented", Undocumented)
    assert missing == ["accel-state: Undocumented"]
    _, missing = section("anything", lambda: None)
    assert missing == ["accel-state: anything"]
    _, missing = section("NOT_THERE", 3)
    assert missing == ["accel-state: NOT_THERE"]
    fake = SimpleNamespace(__all__=["silent"], silent=lambda: None)
    monkeypatch.setattr(reference.importlib, "import_module", lambda _name: fake)
    monkeypatch.setattr(reference, "utils_lines", list)
    with pytest.raises(reference.UndocumentedError, match="accel-data: silent"):
        reference.pages()


def test_members_of_a_class_need_docstrings_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "import_name", lambda package: package.replace("-", "_"))
    monkeypatch.setattr(Undocumented, "__module__", "accel_state.somewhere")
    _, missing = section("Undocumented", Undocumented)
    assert missing == ["accel-state: Undocumented", "accel-state: Undocumented.silent"]  # told() has its base's


def test_constants_are_told_by_the_string_below_them() -> None:
    assert "the peer's checkpoints" in str(reference.constant_docstring("accel-ckpt", "WEIGHTS_NAME"))
    assert reference.constant_docstring("accel-ckpt", "FORMAT_NAME") is None  # of the next run of assignments


def test_sections_of_a_docstring_become_lists() -> None:
    text = "Do *it* with a <file>, `<tag>` and [brackets].\n\nArgs:\n    a, b: one\n        two.\n\nCost: none."
    assert reference.docstring(text, "here", []).splitlines() == [
        r"Do \*it\* with a \<file>, `<tag>` and \[brackets\].",
        "",
        "**Args**",
        "",
        "- `a, b`: one",
        "  two.",
        "",
        "Cost: none.",
    ]


def test_signatures_show_annotations_as_written_and_break_where_they_are_long() -> None:
    def short(self, a: "int", *, b: "str | None" = None, **rest: "object") -> "bool": ...
    def a_long_name(first_one: "list[int]", second: "tuple[int, ...]" = (), third_argument: "int" = 3): ...

    assert reference.signature_of("short", short) == "short(a: int, *, b: str | None = None, **rest: object) -> bool"
    assert reference.signature_of("a_name_that_is_so_much_longer_than_most", a_long_name).splitlines() == [
        "a_name_that_is_so_much_longer_than_most(",
        "    first_one: list[int],",
        "    second: tuple[int, ...] = (),",
        "    third_argument: int = 3,",
        ")",
    ]


def test_the_picture_of_the_packages_is_what_they_declare() -> None:
    graph = pictures.package_graph()
    assert graph.rows[0] == ["accel"]
    assert graph.rows[-2:] == [["accel-state"], ["torch"]]
    assert {name for row in graph.rows for name in row} == {*packages(), "torch"}
    arrows = {(start, end) for start, end, _ in graph.arrows}
    for package in packages():
        declared = " ".join(pyproject(package)["project"]["dependencies"])
        assert all(end in declared for start, end in arrows if start == package)
    assert ("accel", "torch") not in arrows  # follows from the others


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("row a\na: A\na -> b", "which is not so for: b"),
        ("a: A", "which is not so for: a"),
        ("row a\na: A\nnonsense here", "p.txt:3: neither a row, nor a box, nor an arrow: nonsense here"),
    ],
)
def test_a_text_that_gives_no_picture_says_where(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        pictures.parse(text, "p.txt")


def test_a_drawing_has_every_word_and_arrow() -> None:
    drawn = pictures.draw(
        pictures.parse("row a b\nrow c\na: A < 1 / more\nb: B\nc: C\na -> c: down\na -> b\nc -> b", "")
    )
    assert all(f">{word}</text>" in drawn for word in ("A &lt; 1", "more", "B", "C", "down"))
    assert drawn.count("<line ") == 3
