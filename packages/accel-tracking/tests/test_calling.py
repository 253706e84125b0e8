"""Trackers that hang, are slow, or are read while training goes on."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state.errors import TrackerError
from accel_tracking import GeneralTracker, NullTracker, TrackerSet, calling


class Gated(GeneralTracker):
    """Waits in the methods that it is told until `gate` opens."""

    name = "gated"
    requires_logging_directory = False
    patience_s = 0.05
    timeout_s = 0.2

    def __init__(self, run_name: str = "", waits_in: tuple[str, ...] = ("log",)) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.waits_in = waits_in
        self.calls: list[Any] = []
        self.threads: set[int] = set()

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def _call(self, method: str, *rest: Any) -> None:
        self.threads.add(threading.get_ident())
        if method in self.waits_in:
            assert self.gate.wait(60)
        self.calls.append((method, *rest))

    def start(self) -> None:
        self._call("start")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._call("log", values, step)

    def finish(self) -> None:
        self._call("finish")


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        threading.Event().wait(0.05)
    pytest.fail("it did not come to that")


@pytest.fixture
def gated():
    tracker = Gated("p")
    yield tracker
    tracker.gate.set()


def test_a_tracker_that_hangs_in_log_is_reported_once_and_takes_everything_when_it_comes_back(
    gated: Gated, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = TrackerSet(gated)
    trackers.init("p")
    trackers.log({"loss": 0}, step=0)
    threading.Event().wait(gated.timeout_s + 0.05)
    for step in range(1, 50):
        trackers.log({"loss": step}, step=step)
    assert [record.getMessage().split(" and training")[0] for record in caplog.records] == [
        "the tracker 'gated' failed in log()"
    ]
    assert "it has not come back for 0.2 s" in caplog.text
    gated.gate.set()
    wait_until(lambda: len(gated.calls) == 51)
    trackers.finish()
    assert gated.calls == [("start",), *(("log", {"loss": step}, step) for step in range(50)), ("finish",)]
    assert threading.get_ident() not in gated.threads and len(gated.threads) == 1


def test_the_queue_is_bounded_and_what_is_dropped_is_counted(
    gated: Gated, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calling, "CAPACITY", 5)
    trackers = TrackerSet(gated)
    trackers.init("p")
    for step in range(20):
        trackers.log({"loss": step}, step=step)
    assert caplog.text.count("it is 5 calls behind, and no more are kept") == 1
    gated.gate.set()
    wait_until(lambda: len(gated.calls) == 6)
    trackers.finish()
    assert [call[2] for call in gated.calls if call[0] == "log"] == list(range(5))
    assert "the tracker 'gated' failed 15 times in all" in caplog.text


def test_finishing_does_not_wait_for_one_that_hangs(gated: Gated, caplog: pytest.LogCaptureFixture) -> None:
    trackers = TrackerSet(gated)
    trackers.init("p")
    trackers.log({"loss": 1})
    trackers.finish()
    assert "has not finished within 0.2 s; the last 2 calls may be lost, finish() among them" in caplog.text
    assert trackers.trackers == []


def test_one_that_hangs_in_start_is_left_behind_and_closed_should_it_come_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow = Gated("p", waits_in=("start",))
    trackers = TrackerSet(slow)
    trackers.init("p", {"lr": 1})
    assert isinstance(trackers.get("gated"), NullTracker)
    assert "'gated' failed in start()" in caplog.text
    trackers.log({"loss": 1})
    trackers.finish()
    slow.gate.set()
    wait_until(lambda: len(slow.calls) == 2)
    assert slow.calls == [("start",), ("finish",)]


def test_by_default_log_returns_when_the_tracker_has_taken_it() -> None:
    class Patient(Gated):
        patience_s = GeneralTracker.patience_s
        timeout_s = GeneralTracker.timeout_s

    tracker = Patient("p", waits_in=())
    trackers = TrackerSet(tracker)
    trackers.init("p")
    for step in range(20):
        trackers.log({"loss": step}, step=step)
        assert tracker.calls[-1] == ("log", {"loss": step}, step)
    trackers.finish()


def test_values_are_those_of_the_moment_they_were_logged(gated: Gated) -> None:
    trackers = TrackerSet(gated)
    trackers.init("p")
    total, values = torch.zeros(()), {"nested": {"a": [1]}, "pair": (1, 2)}
    trackers.log({"blocks": 0})
    trackers.log({"total": total, **values})
    total += 5
    values["nested"]["a"].append(2)
    gated.gate.set()
    wait_until(lambda: len(gated.calls) == 3)
    trackers.finish()
    (logged,) = [call[1] for call in gated.calls if call[0] == "log"][1:]
    assert logged == {"total": torch.zeros(()), "nested": {"a": [1]}, "pair": (1, 2)}


def test_on_the_training_thread_if_it_wants_to() -> None:
    class Bound(Gated):
        in_background = False

    tracker = Bound("p", waits_in=())
    trackers = TrackerSet(tracker)
    trackers.init("p")
    trackers.log({"a": 1})
    trackers.finish()
    assert tracker.threads == {threading.get_ident()}


def test_a_library_that_ends_the_process_does_not(caplog: pytest.LogCaptureFixture) -> None:
    class Exits(Gated):
        timeout_s = 30.0

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            sys.exit("no account")

    tracker = Exits("p", waits_in=())
    trackers = TrackerSet(tracker)
    trackers.init("p")
    trackers.log({"a": 1})
    trackers.finish()
    assert "SystemExit: no account" in caplog.text
    assert tracker.calls == [("start",), ("finish",)]


def test_a_process_that_ends_without_finishing_has_written_everything(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from accel_tracking import GeneralTracker, TrackerSet

class Slow(GeneralTracker):
    name, requires_logging_directory, tracker, patience_s = "slow", False, None, 0.0

    def log(self, values, step=None):
        time.sleep(0.05)
        with Path({str(tmp_path / "seen")!r}).open("a") as file:
            file.write(f"{{step}} ")

    def finish(self):
        with Path({str(tmp_path / "seen")!r}).open("a") as file:
            file.write("end")

trackers = TrackerSet(Slow())
trackers.init("p")
for step in range(5):
    trackers.log({{"a": 1}}, step=step)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert (tmp_path / "seen").read_text() == "0 1 2 3 4 end"


def test_pictures_and_tables_go_to_those_that_show_them(
    tmp_path: Path, read_lines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = TrackerSet(["jsonl", Gated("p", waits_in=())], tmp_path)
    trackers.init("p")
    for step in range(2):
        trackers.log_images({"x": torch.zeros(2, 3, 4, 5)}, step=step)
        trackers.log_table("t", columns=["a"], data=[[step]], step=step)
    trackers.finish()
    lines = read_lines(tmp_path / "p" / "metrics.jsonl")
    assert [len(line["images"]["x"]) for line in lines if "images" in line] == [2, 2]
    assert [line["rows"] for line in lines if "table" in line] == [[[0]], [[1]]]
    assert caplog.text.count("has no log_images()") == caplog.text.count("has no log_table()") == 1
    with pytest.raises(TrackerError, match="takes either rows"):
        trackers.log_table("t")
