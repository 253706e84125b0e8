from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from accel_state.errors import TrackerError
from accel_tracking import JsonlTracker


@pytest.fixture
def tracker(tmp_path: Path):
    tracker = JsonlTracker("digits", tmp_path)
    tracker.start()
    yield tracker
    tracker.finish()


def test_lines_say_what_they_are(tracker: JsonlTracker, read_lines) -> None:
    tracker.store_init_configuration({"lr": 0.1, "api_key": "hush", "layers": [1, 2]})
    tracker.log({"loss": torch.tensor(0.5), "note": "hi"}, step=7, epoch=2)
    tracker.log_table("errors", columns=["is", "should"], data=[[1, 7]], step=7)
    run, config, log, table = read_lines(tracker.path)
    assert abs(run.pop("time") - time.time()) < 60
    assert run == {"run": tracker.run_id, "project": "digits"}
    assert config["config"] == {"lr": 0.1, "api_key": "***", "layers": [1, 2]}
    assert {key: log[key] for key in ("step", "values", "epoch")} == {
        "step": 7,
        "values": {"loss": 0.5, "note": "hi"},
        "epoch": 2,
    }
    assert (table["table"], table["columns"], table["rows"]) == ("errors", ["is", "should"], [[1, 7]])


def test_nan_and_infinities_are_strings_that_float_reads_back(tracker: JsonlTracker, read_lines) -> None:
    tracker.log({"a": math.nan, "b": math.inf, "c": {"d": -math.inf}, "e": torch.tensor(math.nan), 5: 1.0})
    values = read_lines(tracker.path)[-1]["values"]
    assert values == {"a": "NaN", "b": "Infinity", "c": {"d": "-Infinity"}, "e": "NaN", "5": 1.0}
    assert math.isnan(float(values["a"])) and float(values["c"]["d"]) == -math.inf


def test_a_killed_process_loses_nothing_that_it_logged(tmp_path: Path, read_lines) -> None:
    script = f"""
import os, signal
from accel_tracking import JsonlTracker
tracker = JsonlTracker("p", {str(tmp_path)!r})
tracker.start()
for step in range(100):
    tracker.log({{"loss": step}}, step=step)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], check=False)
    assert [line["step"] for line in read_lines(tmp_path / "p" / "metrics.jsonl")[1:]] == list(range(100))


def test_a_second_start_appends_and_a_known_run_goes_on(tmp_path: Path, read_lines) -> None:
    first = JsonlTracker("p", tmp_path)
    first.start()
    first.log({"loss": 2}, step=1)
    first.finish()
    second = JsonlTracker("p", tmp_path)
    second.resume(first.run_id)
    second.start()
    second.log({"loss": 1}, step=2)
    second.finish()
    lines = read_lines(second.path)
    assert [line.get("run") for line in lines] == [first.run_id, None, first.run_id, None]
    assert [line["step"] for line in lines if "values" in line] == [1, 2]


def test_resume_after_start_says_so_in_the_file(tracker: JsonlTracker, read_lines) -> None:
    tracker.resume("the-run-of-the-checkpoint")
    assert read_lines(tracker.path)[-1]["run"] == tracker.run_id == "the-run-of-the-checkpoint"


@pytest.mark.parametrize("torn", ['{"time": 17', "x" * 200_000])
def test_a_torn_line_is_kept_as_text_and_the_file_stays_valid(tmp_path: Path, read_lines, torn: str) -> None:
    path = tmp_path / "p" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text('{"step": 1, "values": {}}\n' + torn)
    tracker = JsonlTracker("p", tmp_path)
    tracker.start()
    tracker.finish()
    whole, kept, run = read_lines(path)
    assert (whole["step"], kept["torn"], run["project"]) == (1, torn, "p")


def test_a_full_disk_loses_no_line(tracker: JsonlTracker, read_lines, monkeypatch: pytest.MonkeyPatch) -> None:
    write, taken = os.write, 20

    def full(descriptor: int, data: bytes) -> int:
        nonlocal taken
        if not taken:
            raise OSError(28, "No space left on device")
        part = write(descriptor, bytes(data)[:taken])
        taken -= part
        return part

    monkeypatch.setattr(os, "write", full)
    for step in range(2):
        with pytest.raises(OSError, match="No space"):
            tracker.log({"loss": 1}, step=step)
    monkeypatch.setattr(os, "write", write)
    tracker.log({"loss": 1}, step=2)
    assert [line["step"] for line in read_lines(tracker.path)[1:]] == [0, 1, 2]


def test_images_lie_beside_the_file_as_png(tracker: JsonlTracker, read_lines) -> None:
    grey_nchw = torch.linspace(0, 1, 2 * 4 * 3).reshape(2, 1, 4, 3)
    colour_hwc = torch.arange(5 * 6 * 3, dtype=torch.uint8).reshape(5, 6, 3)
    tracker.log_images({"a/../b": grey_nchw}, step=3)
    tracker.log_images({"colour": colour_hwc.numpy()}, step=4, dataformats="HWC")
    grey, colour = (line["images"] for line in read_lines(tracker.path)[1:])
    for index, relative in enumerate(grey["a/../b"]):
        with Image.open(tracker.directory / relative) as picture:
            assert list(picture.tobytes()) == grey_nchw[index].mul(255).round().flatten().tolist()
    assert len(grey["a/../b"]) == 2
    with Image.open(tracker.directory / colour["colour"][0]) as picture:
        assert (picture.mode, picture.size) == ("RGB", (6, 5))
        assert picture.tobytes() == bytes(colour_hwc.flatten().tolist())
    assert sorted(path.parent.name for path in tracker.directory.rglob("*.png")) == ["images"] * 3


@pytest.mark.parametrize(
    ("shape", "formats"), [((2, 2), "NCHW"), ((2, 2, 2), "CHW"), ((1, 2, 2), "CHH"), ((2, 2), "NC")]
)
def test_images_that_do_not_fit_are_refused(tracker: JsonlTracker, shape: tuple[int, ...], formats: str) -> None:
    with pytest.raises(TrackerError, match=r"dataformats|channels"):
        tracker.log_images({"x": torch.zeros(shape)}, dataformats=formats)


def test_logging_to_a_closed_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TrackerError, match=r"call start\(\) first"):
        JsonlTracker("p", tmp_path).log({"loss": 1})


def test_other_ranks_write_nothing(tmp_path: Path, rank_1: None) -> None:
    tracker = JsonlTracker("p", tmp_path)
    tracker.start()
    tracker.store_init_configuration({"a": 1})
    tracker.log({"loss": 1})
    tracker.log_images({"x": torch.zeros(1, 1, 2, 2)})
    tracker.finish()
    assert list(tmp_path.iterdir()) == []
