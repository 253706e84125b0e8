"""Trackers through the Accelerator."""

from __future__ import annotations

import json

import pytest

from accel import Accelerator
from accel_state.errors import TrackerError


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
