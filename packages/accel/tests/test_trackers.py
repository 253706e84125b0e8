"""Trackers through the Accelerator."""

from __future__ import annotations

import json

import pytest
import torch

from accel import Accelerator
from accel_state.errors import SettingError, TrackerError
from accel_tracking import ProfileKwargs


def test_values_reach_the_files_and_ending_twice_is_harmless(tmp_path):
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("run", config={"lr": 0.1})
    accelerator.log({"loss": 0.5}, step=3)
    accelerator.end_training()
    accelerator.close()
    (file,) = tmp_path.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert any(line.get("step") == 3 and line.get("values", line).get("loss") == 0.5 for line in lines)


def test_an_unknown_tracker_names_the_nearest():
    with pytest.raises(TrackerError, match="tensorboard"):
        Accelerator(cpu=True, log_with="tensorbord")


def test_without_trackers_logging_is_harmless():
    accelerator = Accelerator(cpu=True)
    accelerator.log({"loss": 1.0})
    with pytest.raises(TrackerError, match="jsonl"):
        accelerator.get_tracker("jsonl")


def test_images_and_tables_reach_the_files(tmp_path):
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("run")
    accelerator.log_images({"wrong": torch.zeros(2, 3, 4, 5)}, step=1)
    accelerator.log_table("errors", columns=["is", "should"], data=[[1, 7]], step=2)
    accelerator.log({"loss": 0.5}, step=3, reduce="mean")
    accelerator.end_training()
    (file,) = tmp_path.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()][1:]
    assert [(file.parent / name).exists() for name in lines[0]["images"]["wrong"]] == [True, True]
    assert (lines[1]["table"], lines[1]["columns"], lines[1]["rows"]) == ("errors", ["is", "should"], [[1, 7]])
    assert lines[2]["values"] == {"loss": 0.5}


def test_the_handler_of_a_profile_beats_the_constructors(tmp_path):
    handlers = [ProfileKwargs(record_shapes=True, output_trace_dir=str(tmp_path / "constructor"))]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    with accelerator.profile() as profiler:
        torch.ones(3) + 1
    assert isinstance(profiler, torch.profiler.profile)
    assert profiler.record_shapes
    assert [path.name for path in (tmp_path / "constructor").iterdir()] == ["profile_0.json"]
    with accelerator.profile(ProfileKwargs(output_trace_dir=str(tmp_path / "call"))) as profiler:
        torch.ones(3) + 1
    assert not profiler.record_shapes
    trace = json.loads((tmp_path / "call" / "profile_0.json").read_text())
    assert any(event.get("name") == "aten::add" for event in trace["traceEvents"])
    with pytest.raises(SettingError, match="'tpu9'"), accelerator.profile(ProfileKwargs(activities=["tpu9"])):
        pass
