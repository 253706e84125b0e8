"""Loggers on one and on several ranks."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_state import MultiProcessAdapter, PartialState, get_logger
from accel_state.errors import SettingError

Ranks = Callable[..., list[Any]]


def line_of(needle: str) -> int:
    lines, start = inspect.getsourcelines(test_the_callers_file_and_line_are_kept)
    return next(start + number for number, line in enumerate(lines) if needle in line)


def test_the_callers_file_and_line_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("accel.tests.lines")

    def helper(**kwargs: Any) -> None:
        logger.warning("from the helper", **kwargs)  # in helper

    logger.warning("by its method")  # by method
    logger.log(logging.WARNING, "by log")  # by log
    helper()
    helper(stacklevel=2)
    helper(stacklevel=3)  # one further out
    logger.warning("in order", in_order=True)  # ordered
    logger.warning_once("only once")  # once
    expected = ["by method", "by log", "in helper", "in helper", "one further", "ordered", "# once"]
    assert [record.lineno for record in caplog.records] == [line_of(needle) for needle in expected]
    assert {record.filename for record in caplog.records} == {"test_loggers.py"}
    assert caplog.messages[0] == "[RANK 0] by its method"


def test_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        get_logger("accel.tests.once").warning_once("the %s message", "same")
    get_logger("accel.tests.once").warning_once("the %s message", "other")
    assert caplog.messages == ["[RANK 0] the same message", "[RANK 0] the other message"]


def test_exceptions_carry_their_traceback(caplog: pytest.LogCaptureFixture) -> None:
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        get_logger("accel.tests.errors").exception("failed")
    assert "ZeroDivisionError" in caplog.text


def test_levels(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = get_logger("accel.tests.levels", log_level="ERROR")
    logger.warning("too quiet")
    assert isinstance(logger, MultiProcessAdapter) and logger.getEffectiveLevel() == logging.ERROR
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "debug")
    get_logger("accel.tests.levels2").debug("heard")
    assert caplog.messages == ["[RANK 0] heard"]
    with pytest.raises(SettingError, match="loud"):
        get_logger("accel.tests.levels", log_level="loud")


def test_before_any_state_the_launchers_variables_tell_the_rank(
    fresh_state: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    logger = get_logger("accel.tests.early")
    logger.warning("main only")
    logger.warning("all", main_process_only=False)
    assert caplog.messages == ["[RANK 1] all"]


def test_who_speaks_on_several_ranks(ranks: Ranks) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        heard: list[str] = []

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                heard.append(record.getMessage())

        logger = get_logger("job")
        logger.logger.addHandler(Handler())
        logger.warning("main")
        logger.warning("all", main_process_only=False)
        logger.warning("order", in_order=True)
        logger.logger.setLevel(logging.WARNING if rank else logging.ERROR)
        logger.warning("levels differ", in_order=True)
        return heard

    assert ranks(body, 2) == [
        ["[RANK 0] main", "[RANK 0] all", "[RANK 0] order"],
        ["[RANK 1] all", "[RANK 1] order", "[RANK 1] levels differ"],
    ]


class Lines(logging.Handler):
    """Writes what is logged to a file that the ranks share."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        with self.path.open("a") as file:
            file.write(f"{record.getMessage()}\n")


def test_messages_come_rank_after_rank(ranks: Ranks, tmp_path: Path) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        logger = get_logger("job")
        logger.logger.addHandler(Lines(tmp_path / "log"))
        for round_ in range(3):
            time.sleep(0.1 * (2 - rank))
            logger.warning("%d", round_, in_order=True)
            PartialState().wait_for_everyone()
        return None

    ranks(body, 3)
    assert (tmp_path / "log").read_text().splitlines() == [
        f"[RANK {rank}] {round_}" for round_ in range(3) for rank in range(3)
    ]


def test_a_rank_that_does_not_log_is_waited_for_once_until_it_is_heard_again(ranks: Ranks, tmp_path: Path) -> None:
    def body() -> Any:
        from accel_state import rank_order
        from accel_state.process_group import current_job

        rank_order._PATIENCE_S = 0.3
        waits: list[bool] = []
        until = rank_order.until
        rank_order.until = lambda is_so, limit_s: waits.append(until(is_so, limit_s)) or waits[-1]  # type: ignore[func-returns-value]
        state = PartialState(cpu=True)
        rank = state.process_index
        logger = get_logger("job")
        logger.logger.addHandler(Lines(tmp_path / "log"))
        channel = current_job().channel
        assert channel is not None

        def say(word: str) -> None:
            logger.warning(word, in_order=True)

        say("all")
        state.wait_for_everyone()
        num_keys = channel.store.num_keys()
        if rank == 1:
            for _ in range(20):
                say("alone")
                logger.warning("elsewhere", in_order=True)
        vain = waits.count(False)
        state.wait_for_everyone()
        if rank == 0:
            say("again")
        state.wait_for_everyone()
        if rank == 1:
            say("again")  # after rank 0 was heard, which has said as much by now
        state.wait_for_everyone()
        time.sleep(0.1 * (1 - rank))
        say("together")
        return vain, waits.count(False) - vain, channel.store.num_keys() - num_keys

    assert ranks(body, 2) == [(0, 0, 0), (1, 0, 0)]
    log = (tmp_path / "log").read_text().splitlines()
    assert log[:2] == ["[RANK 0] all", "[RANK 1] all"]
    assert log[-4:] == ["[RANK 0] again", "[RANK 1] again", "[RANK 0] together", "[RANK 1] together"]


def test_it_speaks_where_the_launchers_variables_are_incomplete(monkeypatch, caplog):
    for name, text in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, text)
    PartialState._reset_state()
    get_logger("accel.tests.incomplete").warning("heard")
    monkeypatch.setenv("RANK", "1")
    get_logger("accel.tests.incomplete").warning("not heard")
    assert [record.getMessage() for record in caplog.records] == ["[RANK 0] heard"]
