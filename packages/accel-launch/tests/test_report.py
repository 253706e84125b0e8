"""Who is blamed, and which words are repeated last."""

from types import SimpleNamespace

import pytest

from accel_launch.spawn.report import describe, exit_code, failure_message, first_failure, last_words

NEVER = float("inf")
RAISED = "progress 10%\nTraceback (most recent call last):\n  File ...\nValueError: boom\n"


def child(rank, returncode, *, ended=NEVER, failed=NEVER, signalled=False, tail=""):
    return SimpleNamespace(
        rank=rank, returncode=returncode, ended_at_s=ended, failed_at_s=failed, was_signalled=signalled, tail=tail
    )


def test_nobody_is_blamed_for_a_good_end():
    assert first_failure([child(0, 0, ended=1), child(1, 0, ended=2)]) is None


def test_the_earlier_traceback_beats_the_earlier_end():
    slow = child(1, 1, ended=3, failed=1, tail=RAISED)
    assert first_failure([child(0, 1, ended=2, failed=1.5), slow]) is slow


def test_an_end_without_traceback_counts_by_its_time():
    killed = child(0, -9, ended=1)
    assert first_failure([child(1, 1, ended=2, failed=1.5), killed]) is killed


def test_a_rank_cut_short_while_it_shut_down_is_blamed_but_not_for_our_signal():
    cut = child(1, -15, ended=3, failed=1, signalled=True, tail=RAISED)
    other = child(0, 7, ended=2, failed=1.5)
    assert first_failure([other, cut]) is cut
    assert exit_code([other, cut], cut) == 7
    message = failure_message(cut, [other, cut])
    assert "rank 1 of 2 failed first: its error" in message
    assert message.endswith("ValueError: boom\n")


def test_a_rank_that_logged_an_error_and_went_on_is_not_blamed():
    healthy = child(1, -15, ended=3, failed=1, signalled=True, tail=RAISED + "progress 20%\n")
    broken = child(0, 1, ended=2)
    assert first_failure([healthy, broken]) is broken


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (3, "exit code 3"),
        (-11, "killed by SIGSEGV"),
        (-9, "killed by SIGKILL; where nobody did that by hand, the system ran out of memory"),
        (-63, "killed by signal 63"),
    ],
)
def test_how_it_ended(returncode, words):
    assert describe(returncode) == words


def test_last_words_are_the_last_traceback():
    assert last_words("noise\n" + RAISED) == RAISED.partition("\n")[2].rstrip()


@pytest.mark.parametrize(
    "joint",
    [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ],
)
def test_last_words_hold_the_whole_chain(joint):
    first = "Traceback (most recent call last):\n  File ...\nKeyError: 1\n"
    second = "Traceback (most recent call last):\n  File ...\nValueError: 2\n"
    assert (
        last_words(f"{first}logged and gone on\n{first}\n{joint}\n\n{second}")
        == f"{first}\n{joint}\n\n{second}".rstrip()
    )


def test_last_words_without_a_traceback_are_the_last_lines():
    assert last_words("\n".join(map(str, range(100)))).splitlines() == [str(line) for line in range(80, 100)]
    assert last_words("") == ""
