from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from accel_state.errors import SettingError
from accel_tracking import ProfileKwargs, profile


def work() -> None:
    torch.ones(4) @ torch.ones(4)


def test_it_yields_torchs_profiler() -> None:
    with profile() as profiler:
        work()
    assert isinstance(profiler, torch.profiler.profile)
    assert "aten::dot" in {event.key for event in profiler.key_averages()}


def test_traces_are_named_by_rank_and_only_written_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with profile(ProfileKwargs(activities=["cpu"]), 3):
        work()
    assert list(tmp_path.iterdir()) == []
    with profile(ProfileKwargs(output_trace_dir=str(tmp_path / "a" / "b"), record_shapes=True), 3):
        work()
    (trace,) = (tmp_path / "a" / "b").iterdir()
    assert trace.name == "profile_3.json"
    assert any(event.get("name") == "aten::dot" for event in json.loads(trace.read_text())["traceEvents"])


def test_a_schedule_and_a_handler_of_ones_own() -> None:
    seen = []
    kwargs = ProfileKwargs(
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 1}, on_trace_ready=seen.append
    )
    with profile(kwargs) as profiler:
        for _ in range(5):
            work()
            profiler.step()
    assert seen == [profiler]


def test_a_trace_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    never = ProfileKwargs(schedule_option={"wait": 9, "warmup": 1, "active": 1}, output_trace_dir=str(tmp_path / "a"))
    with profile(never) as profiler:
        profiler.step()
    assert "schedule_option never became active" in caplog.text
    saved = ProfileKwargs(
        on_trace_ready=lambda p: p.export_chrome_trace(str(tmp_path / "own.json")), output_trace_dir=str(tmp_path / "b")
    )
    with profile(saved):
        work()
    assert "Trace is already saved" in caplog.text
    assert (tmp_path / "own.json").exists()


def test_an_error_in_the_block_comes_through(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), profile(ProfileKwargs(output_trace_dir=str(tmp_path / "a"))):
        _ = 1 / 0
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"activities": ["gpu"]}, r"'gpu'.*can watch: .*cpu"),
        ({"schedule_option": {"wait": 1}}, "give wait, warmup and active"),
        ({"schedule_option": {"wait": 1, "warmup": 1, "active": 0}}, "give wait, warmup and active"),
    ],
)
def test_what_torch_does_not_take_is_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        ProfileKwargs(**kwargs).build()
