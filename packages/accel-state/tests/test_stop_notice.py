"""Asked to stop: by a signal, a limit or a call, on any rank, and all ranks know at the same question."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from accel_state import PartialState, StopNotice
from accel_state.errors import CollectiveMismatchError

Ranks = Callable[..., list[Any]]
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def notice(fresh_state: None) -> Iterator[StopNotice]:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    made = StopNotice()
    yield made
    made.close()
    for signum, handler in zip(SIGNALS, before, strict=True):
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", SIGNALS, ids=str)
def test_one_process_stops_at_once_and_for_good(notice: StopNotice, signum: signal.Signals) -> None:
    assert not notice.check()
    os.kill(os.getpid(), signum)
    assert notice.check() and notice.check()


def test_signals_are_left_alone_before_the_first_question_and_after_the_end(notice: StopNotice) -> None:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    assert not notice.check()
    assert all(signal.getsignal(signum) not in before for signum in SIGNALS)
    notice.close()
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


def test_after_the_decision_a_signal_that_is_repeated_does_not_end_the_process(notice: StopNotice) -> None:
    notice.check()
    notice.request()
    assert notice.check()
    notice.close()
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_handler_of_the_users_is_called_too(notice: StopNotice) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda signum, _: heard.append(signum))
    notice.check()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert notice.check() and heard == [signal.SIGUSR1]


def test_two_notices_hear_one_signal(notice: StopNotice) -> None:
    other = StopNotice()
    assert not notice.check() and not other.check()
    os.kill(os.getpid(), signal.SIGTERM)
    assert notice.check() and other.check()


def test_a_forked_helper_is_ended_by_the_signal(notice: StopNotice) -> None:
    notice.check()
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    assert not notice.check()


def test_a_limit(notice: StopNotice, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("accel_state.stop_notice.time.monotonic", lambda: now)
    limited = StopNotice(time_limit_s=60)
    assert not limited.check()
    now = 159.9
    assert not limited.check()
    now = 160.0
    assert limited.check()
    limited.close()


def test_in_a_thread_it_says_that_signals_are_not_heard(notice: StopNotice) -> None:
    said: list[str] = []

    def ask() -> None:
        with pytest.warns(UserWarning, match="takes no signals") as record:
            notice.check()
        said.extend(str(warning.message) for warning in record)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert said


@pytest.mark.parametrize("whose", [0, 1, 2])
def test_all_ranks_stop_at_the_question_after_the_signal(ranks: Ranks, whose: int) -> None:
    def body() -> Any:
        state = PartialState(cpu=True)
        notice = StopNotice()
        answers = []
        for update in range(6):
            if update == 3 and state.process_index == whose:
                os.kill(os.getpid(), signal.SIGTERM)
            answers.append(notice.check())
        notice.close()
        return answers

    # asked at 3, answered at 4
    assert ranks(body, 3) == [[False] * 4 + [True] * 2] * 3


def test_a_rank_that_does_not_ask_is_named(ranks: Ranks) -> None:
    def body() -> Any:
        state = PartialState(cpu=True, timeout=timedelta(seconds=2))
        notice = StopNotice()
        notice.check()
        if state.process_index == 1:
            time.sleep(4)
            return None
        notice.check()  # answers the first question
        with pytest.raises(CollectiveMismatchError) as caught:
            notice.check()
        return str(caught.value)

    message, _ = ranks(body, 2)
    assert "collective number 2 of should_stop" in message and "rank 1 never came" in message
