from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state import PartialState
from accel_state.errors import TrackerError
from accel_state.testing import run_ranks
from accel_tracking import GeneralTracker, JsonlTracker, NullTracker, TrackerSet, on_main_process


class Recorder(GeneralTracker):
    """Keeps its calls; fails in the methods that it is told."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self, run_name: str = "", fails_in: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = [("made", run_name, kwargs)]
        self.fails_in = fails_in

    @property
    def tracker(self) -> list[tuple[Any, ...]]:
        return self.calls

    def _call(self, method: str, *rest: Any) -> None:
        if method in self.fails_in:
            raise ConnectionError(f"no network in {method}")
        self.calls.append((method, *rest))

    def start(self) -> None:
        self._call("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._call("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._call("log", values, step, kwargs)

    def finish(self) -> None:
        self._call("finish")


class OnEveryRank(Recorder):
    name = "every-rank"
    main_process_only = False


def test_the_whole_life_of_a_run() -> None:
    trackers = TrackerSet(Recorder)
    trackers.init("digits", {"lr": 1, "password": "x"}, {"recorder": {"tag": "a"}, "wandb": {"entity": "unused here"}})
    trackers.log({"loss": 1}, step=3, log_kwargs={"recorder": {"commit": True}})
    calls = trackers.get("recorder", unwrap=True)
    assert trackers.get("recorder") is trackers.trackers[0]
    trackers.finish()
    trackers.finish()
    assert calls == [
        ("made", "digits", {"tag": "a"}),
        ("start",),
        ("config", {"lr": 1, "password": "***"}),
        ("log", {"loss": 1}, 3, {"commit": True}),
        ("finish",),
    ]


def test_without_trackers_everything_is_harmless() -> None:
    trackers = TrackerSet()
    trackers.init("p", {"a": 1})
    trackers.log({"loss": 1})
    trackers.finish()
    assert trackers.state_dict() == {"run_ids": {}}


def test_a_tracker_that_fails_is_reported_once_by_name_and_the_others_go_on(
    tmp_path: Path, read_lines, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = TrackerSet([Recorder("p", fails_in=("log",)), "jsonl"], tmp_path)
    trackers.init("p")
    for step in range(3):
        trackers.log({"loss": 1}, step=step)
    assert [record.getMessage() for record in caplog.records if "recorder" in record.getMessage()] == [
        "the tracker 'recorder' failed in log() and training goes on without what it missed; further failures are "
        "counted, not shown: ConnectionError: no network in log"
    ]
    trackers.finish()
    assert "the tracker 'recorder' failed 3 times in all" in caplog.text
    assert [line["step"] for line in read_lines(tmp_path / "p" / "metrics.jsonl")[1:]] == [0, 1, 2]


@pytest.mark.parametrize("method", ["start", "config", "finish"])
def test_it_may_fail_anywhere(method: str, caplog: pytest.LogCaptureFixture) -> None:
    trackers = TrackerSet(Recorder("p", fails_in=(method,)))
    trackers.init("p", {"a": 1})
    trackers.log({"loss": 1})
    assert isinstance(trackers.get("recorder"), NullTracker) == (method == "start")
    trackers.finish()
    assert caplog.text.count("the tracker 'recorder' failed in") == 1


def test_other_ranks_get_null_trackers_that_take_every_call(tmp_path: Path, rank_1: None) -> None:
    every = OnEveryRank("p")
    trackers = TrackerSet(["jsonl", Recorder, every], tmp_path)
    trackers.init("p", {"a": 1})
    trackers.log({"loss": 1})
    null = trackers.get("jsonl")
    assert isinstance(null, NullTracker) and isinstance(null, GeneralTracker) and not null
    null.log_images({"x": []}, step=0)
    with trackers.get("recorder", unwrap=True) as library:
        library.summary["best"] = 3
        library.summary["best"].update(3).anything()
    assert list(library) == []
    assert [call[0] for call in every.calls] == ["made", "start", "config", "log"]
    trackers.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_null_tracker_copies_and_pickles() -> None:
    null = NullTracker("wandb")
    assert copy.deepcopy(null).name == pickle.loads(pickle.dumps(null)).name == "wandb"


def test_runs_go_on_after_a_checkpoint(tmp_path: Path, read_lines) -> None:
    first = TrackerSet("jsonl", tmp_path)
    first.init("p")
    saved = first.state_dict()
    first.finish()
    assert first.state_dict() == saved
    second = TrackerSet("jsonl", tmp_path)
    second.load_state_dict(saved)
    assert second.state_dict() == saved
    second.init("p")
    assert second.state_dict() == saved
    second.finish()
    third = TrackerSet("jsonl", tmp_path)
    third.init("p")
    third.load_state_dict(saved)
    assert third.state_dict() == saved
    third.finish()
    runs = [line["run"] for line in read_lines(tmp_path / "p" / "metrics.jsonl")]
    assert runs[:2] == [saved["run_ids"]["jsonl"]] * 2
    assert runs[2] != runs[3] == runs[0]


def test_a_service_that_cannot_change_runs_says_so(caplog: pytest.LogCaptureFixture) -> None:
    service = Recorder("p")
    service.run_id = "new"
    trackers = TrackerSet(service)
    trackers.init("p")
    trackers.load_state_dict({"run_ids": {"recorder": "old"}})
    assert "run 'old' of the checkpoint is not continued" in caplog.text
    trackers.finish()


def test_without_a_directory_a_default_is_used_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    trackers = TrackerSet("jsonl")
    trackers.init("p")
    trackers.finish()
    assert (tmp_path / "runs" / "p" / "metrics.jsonl").exists()
    assert f"without logging_dir it is {tmp_path / 'runs'}" in caplog.text


def test_an_unwritable_directory_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "p").write_text("a file where the folder should be")
    trackers = TrackerSet("jsonl", tmp_path)
    trackers.init("p", {"a": 1})
    trackers.log({"loss": 1})
    trackers.finish()
    assert "the tracker 'jsonl' failed in start()" in caplog.text


def test_logging_while_nothing_runs_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    trackers = TrackerSet("jsonl")
    trackers.log({"loss": 1})
    trackers.log({"loss": 1})
    assert caplog.text.count("records nothing") == 1


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    trackers = TrackerSet(["jsonl", Recorder], tmp_path)
    with pytest.raises(TrackerError, match="is not running"):
        trackers.get("jsonl")
    with pytest.raises(TrackerError, match="asked for: jsonl, recorder"):
        trackers.get("wandb")
    with pytest.raises(TrackerError, match="did you mean 'jsonl'"):
        trackers.init("p", init_kwargs={"jsonnl": {}})
    with pytest.raises(TrackerError, match=r"vars\(args\)"):
        trackers.init("p", config=[1])  # type: ignore[arg-type]
    with pytest.raises(TrackerError, match=r"'jsonl' cannot be made.*colour"):
        trackers.init("p", init_kwargs={"jsonl": {"colour": 1}})
    trackers.init("p")
    with pytest.raises(TrackerError, match="initialised already"):
        trackers.init("p")
    with pytest.raises(TrackerError, match="takes a mapping"):
        trackers.log(3.0)  # type: ignore[arg-type]
    with pytest.raises(TrackerError, match="log_kwargs names 'recoder'"):
        trackers.log({"loss": 1}, log_kwargs={"recoder": {}})
    trackers.finish()


def test_wrong_arguments_are_refused_on_every_rank(tmp_path: Path, rank_1: None) -> None:
    with pytest.raises(TrackerError, match="colour"):
        TrackerSet("jsonl", tmp_path).init("p", init_kwargs={"jsonl": {"colour": 1}})


def test_a_subclass_has_to_be_complete() -> None:
    class Incomplete(GeneralTracker):
        name = "incomplete"

    with pytest.raises(NotImplementedError, match="`requires_logging_directory`, `tracker`"):
        Incomplete()
    assert GeneralTracker(_blank=True).log({}) is None


def test_on_main_process_follows_the_tracker(rank_1: None) -> None:
    class Guarded(OnEveryRank):
        @on_main_process
        def where(self) -> str:
            return "here"

    tracker = Guarded("p")
    assert tracker.where() == "here"
    tracker.main_process_only = True
    assert tracker.where() is None


def test_a_tracker_of_ours_works_alone(tmp_path: Path) -> None:
    tracker = JsonlTracker("p", tmp_path)
    tracker.start()
    tracker.log({"loss": 1})
    tracker.finish()
    assert tracker.tracker.exists()


class Hangs(Recorder):
    """Waits in `log` until it is let go."""

    timeout_s = 0.05
    patience_s = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = threading.Event()

    def start(self) -> None:
        """Its start is quick."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.gate.wait(30)
        super().log(values, step, **kwargs)


def test_a_tracker_that_hangs_is_left_behind_and_the_others_go_on(
    tmp_path: Path, read_lines, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = Hangs("p")
    trackers = TrackerSet([hanging, "jsonl"], tmp_path)
    trackers.init("p")
    try:
        trackers.log({"loss": torch.tensor(1.0)}, step=0)
        trackers.finish()
        assert "the tracker 'recorder' has not finished within 0.05 s; the last 2 calls may be lost" in caplog.text
        assert hanging.calls == [("made", "p", {})]
        assert [line["step"] for line in read_lines(tmp_path / "p" / "metrics.jsonl")[1:]] == [0]
    finally:
        hanging.gate.set()


def test_what_is_logged_is_what_it_was_at_that_moment() -> None:
    hanging = Hangs("p")
    hanging.timeout_s = 30.0
    trackers = TrackerSet(hanging)
    trackers.init("p")
    total = torch.zeros(1)
    trackers.log({"total": total}, step=0)
    total += 1
    hanging.gate.set()
    trackers.finish()
    assert [call[:3] for call in hanging.calls[1:-1]] == [("log", {"total": torch.zeros(1)}, 0)]


def test_images_and_tables_name_a_tracker_without_them_once(caplog: pytest.LogCaptureFixture) -> None:
    trackers = TrackerSet(Recorder)
    trackers.init("p")
    for _ in range(2):
        trackers.log_images({"x": torch.zeros(1, 3, 2, 2)})
        trackers.log_table("t", data=[[1]])
    assert caplog.text.count("has no log_images()") == caplog.text.count("has no log_table()") == 1
    with pytest.raises(TrackerError, match="either rows"):
        trackers.log_table("t")
    trackers.finish()


def _log_on_a_rank(folder: str) -> None:
    rank = PartialState(cpu=True).process_index
    trackers = TrackerSet("jsonl", folder)
    trackers.init("p")
    for rule in ("mean", "sum", "min", "max"):
        trackers.log({"loss": float(rank), "who": f"rank {rank}"}, reduce=rule)
    with pytest.raises(TrackerError, match="rank 1 has"):
        trackers.log({f"loss{rank}": 1.0}, reduce="mean")
    trackers.finish()


def test_numbers_are_reduced_over_ranks(tmp_path: Path, read_lines) -> None:
    run_ranks(_log_on_a_rank, 2, str(tmp_path))
    values = [line["values"] for line in read_lines(tmp_path / "p" / "metrics.jsonl")[1:]]
    assert [(row["loss"], row["who"]) for row in values] == [(n, "rank 0") for n in (0.5, 1.0, 0.0, 1.0)]
