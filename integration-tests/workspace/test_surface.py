"""The public API is what the committed snapshot says."""

import argparse
import enum
from dataclasses import dataclass
from typing import Any

import pytest
from devtool import surface
from devtool.paths import import_name, packages


@pytest.mark.parametrize("package", packages())
def test_the_surface_is_the_committed_one(package: str) -> None:
    difference = surface.compare(package)
    if difference:
        pytest.fail(
            "\n".join(["the public API changed; if it is meant: `tools/dev surface`, and commit.", *difference]),
            pytrace=False,
        )


@pytest.mark.parametrize("package", packages())
def test_all_names_can_be_imported_and_are_listed_once(package: str) -> None:
    module = __import__(import_name(package))
    assert len(module.__all__) == len(set(module.__all__))
    assert {name for name in module.__all__ if not hasattr(module, name)} == set()
    assert set(module.__all__) <= set(dir(module))


SOMETHING = object()


def test_parameters_are_told_with_kind_and_default() -> None:
    def function(a: int, /, b: str = "x", *rest: int, c: float, d: Any = None, **more: Any) -> None: ...

    assert surface.parameters_of(function) == ["a, /", "b='x'", "*rest", "*, c", "*, d=None", "**more"]


def test_enums_and_values_are_told_without_addresses() -> None:
    class Colour(enum.Enum):
        RED = "red"

    def function(a: Any = Colour.RED, b: Any = SOMETHING, c: Any = len) -> None: ...

    assert surface.describe(Colour)["members"] == {"RED": "'red'"}
    assert surface.parameters_of(function) == ["a=Colour.RED", "b=<object object>", "c=<built-in function len>"]


def test_a_dataclass_tells_its_fields_and_whether_it_is_frozen() -> None:
    @dataclass(frozen=True)
    class Point:
        x: int
        y: int = 0

    assert surface.describe(Point) == {"bases": [], "()": ["x", "y=0"], "frozen": True}


def test_flags_are_told_with_default_and_choices() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", "-p", choices=["no", "bf16"], default="no")
    parser.add_argument("script", nargs="?")
    assert surface._flags(parser) == {
        "--precision -p": "default 'no'; one of no, bf16",
        "script": "default None; nargs ?",
    }
