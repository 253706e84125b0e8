"""Environment helpers, in the peer's words."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from accel_state import (
    clear_environment,
    convert_dict_to_env_variables,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
)


@pytest.mark.parametrize("word", ["y", "Yes", "T", "true", "ON", "1"])
def test_words_for_true(word: str) -> None:
    assert str_to_bool(word) == 1 and str_to_bool(word, to_bool=True) is True


@pytest.mark.parametrize("word", ["n", "No", "F", "false", "OFF", "0"])
def test_words_for_false(word: str) -> None:
    assert str_to_bool(word) == 0 and str_to_bool(word, to_bool=True) is False


def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"invalid truth value 'maybe': allowed are 0, 1, f"):
        str_to_bool("maybe")
    monkeypatch.setenv("MY_FLAG", "maybe")
    with pytest.raises(ValueError, match="MY_FLAG: invalid truth value 'maybe'"):
        parse_flag_from_env("MY_FLAG")


def test_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A", raising=False)
    monkeypatch.setenv("B", "7")
    assert get_int_from_env(["A", "B"], 5) == 7
    monkeypatch.setenv("A", "-1")
    assert get_int_from_env(["A", "B"], 5) == 7
    assert get_int_from_env(["A"], 5) == 5
    monkeypatch.setenv("A", "many")
    with pytest.raises(ValueError, match="A='many' is not an integer"):
        get_int_from_env(["A"], 5)
    assert parse_choice_from_env("B") == "7" and parse_choice_from_env("NOT_THERE") == "no"
    assert parse_flag_from_env("NOT_THERE", default=True) is True


def test_lines_for_a_file_leave_out_what_it_cannot_hold(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert convert_dict_to_env_variables({"GOOD": "1", "BAD": "a b", "EMPTY": ""}) == ["GOOD=1\n"]
    assert "BAD='a b'" in caplog.text and "EMPTY=''" in caplog.text


def test_a_patch_upper_cases_and_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("MADE", raising=False)
    with pytest.raises(KeyError), patch_environment(kept=1, made="x"):
        assert (os.environ["KEPT"], os.environ["MADE"]) == ("1", "x")
        raise KeyError
    assert os.environ["KEPT"] == "before" and "MADE" not in os.environ


def test_clearing_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")
    with clear_environment():
        assert not os.environ
        os.environ["MADE"] = "1"
    assert os.environ["KEPT"] == "before" and "MADE" not in os.environ


# ---------------------------------------------------------------- purging


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_OLD", "before")
    monkeypatch.delenv("ACCELERATE_NEW", raising=False)


def meddle() -> None:
    os.environ.update(ACCELERATE_OLD="after", ACCELERATE_NEW="1", ACCEL_NEW="1")


def is_as_before() -> bool:
    return os.environ["ACCELERATE_OLD"] == "before" and not {"ACCELERATE_NEW", "ACCEL_NEW"} & os.environ.keys()


def removes() -> None:
    del os.environ["ACCELERATE_OLD"]


def raises() -> None:
    meddle()
    raise KeyError


def generates() -> Iterator[int]:
    meddle()
    yield 1


async def awaits() -> None:
    meddle()


@pytest.mark.usefixtures("variables")
@pytest.mark.parametrize("function", [meddle, removes, raises, generates, awaits])
def test_functions_of_all_kinds_leave_no_trace(function: Any) -> None:
    purged = purge_accelerate_environment(function)
    assert purged.__name__ == function.__name__
    if function is raises:
        with pytest.raises(KeyError):
            purged()
    elif function is awaits:
        asyncio.run(purged())
    elif function is generates:
        assert list(purged()) == [1]
    else:
        purged()
    assert is_as_before()


class Inherited:
    def test_inherited(self) -> None:
        meddle()


class Told(Inherited):
    subclasses: list[str] = []  # noqa: RUF012  (a plain class attribute is what is tested)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.subclasses.append(cls.__name__)


class Cases(Told):
    def test_plain(self) -> None:
        meddle()

    @staticmethod
    def test_static() -> int:
        meddle()
        return 3

    @classmethod
    def test_class(cls) -> str:
        meddle()
        return cls.__name__

    def helper(self) -> None:
        meddle()


@pytest.mark.usefixtures("variables")
def test_classes_are_purged_with_what_they_inherit_and_what_inherits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    purged = purge_accelerate_environment(Cases)

    class Later(purged):  # type: ignore[misc,valid-type]
        def test_later(self) -> None:
            meddle()

    for cls in (purged, Later):
        for name in ("test_plain", "test_inherited", "test_static", "test_class"):
            getattr(cls(), name)()
            assert is_as_before(), (cls, name)
    Later().test_later()
    assert is_as_before()
    assert (Later.test_static(), Later.test_class(), Told.subclasses) == (3, "Later", ["Cases", "Later"])
    monkeypatch.setenv("ACCELERATE_NEW", "0")  # so that it is removed afterwards
    monkeypatch.setenv("ACCEL_NEW", "0")
    Later().helper()
    assert os.environ["ACCELERATE_NEW"] == "1", "only tests are purged"
