from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from accel_state.errors import TrackerError
from accel_tracking import TensorBoardTracker


def read(directory: Path) -> EventAccumulator:
    return EventAccumulator(str(directory), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()


@pytest.fixture
def tracker(tmp_path: Path):
    tracker = TensorBoardTracker("digits", tmp_path)
    tracker.start()
    yield tracker
    tracker.finish()


def test_scalars_and_text_read_back(tracker: TensorBoardTracker) -> None:
    for step in range(3):
        tracker.log({"loss": torch.tensor(1.0 / (step + 1)), "count": step}, step=step)
    tracker.log({"note": "halfway"}, step=2)
    tracker.finish()
    events = read(tracker.directory)
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3))]
    assert [e.value for e in events.Scalars("count")] == [0.0, 1.0, 2.0]
    (text,) = events.Tensors("note/text_summary")
    assert text.tensor_proto.string_val == [b"halfway"]


def test_a_mapping_becomes_one_chart_of_several_lines(tracker: TensorBoardTracker) -> None:
    tracker.log({"loss": {"train": 1.0, "test": torch.tensor(2.0)}}, step=1)
    tracker.finish()
    assert read(tracker.directory / "loss_train").Scalars("loss")[0].value == 1.0
    assert read(tracker.directory / "loss_test").Scalars("loss")[0].value == 2.0


def test_images_read_back(tracker: TensorBoardTracker) -> None:
    pixels_hwc = torch.arange(4 * 5 * 3, dtype=torch.uint8).reshape(4, 5, 3)
    tracker.log_images({"wrong": pixels_hwc.unsqueeze(0)}, step=2, dataformats="NHWC")
    tracker.finish()
    (event,) = read(tracker.directory).Images("wrong")
    assert event.step == 2
    assert Image.open(io.BytesIO(event.encoded_image_string)).tobytes() == bytes(pixels_hwc.flatten().tolist())


def test_the_configuration_reads_back_from_the_run_and_from_its_file(tracker: TensorBoardTracker) -> None:
    config = {"lr": 0.1, "optimizer": {"name": "sgd", "betas": [1, 2]}, "amp": True, "hf_token": "hf_0123456789"}
    tracker.store_init_configuration(config)
    tracker.log({"loss": 1.0}, step=1)
    tracker.finish()
    events = read(tracker.directory)
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    shown = HParamsPluginData.FromString(content).session_start_info.hparams
    assert shown["lr"].number_value == 0.1
    assert shown["optimizer.name"].string_value == "sgd"
    assert shown["optimizer.betas"].string_value == "[1, 2]"
    assert shown["amp"].number_value == 1
    assert shown["hf_token"].string_value == "***"
    assert events.Scalars("loss")[0].value == 1.0
    assert json.loads((tracker.directory / "hparams.yml").read_text()) == config | {"hf_token": "***"}
    assert [path.name for path in tracker.directory.iterdir() if path.is_dir()] == []


def test_arguments_reach_the_writer(tmp_path: Path) -> None:
    tracker = TensorBoardTracker("p", tmp_path, filename_suffix=".mine")
    tracker.start()
    tracker.log({"a": 1}, step=0, walltime=12.0)
    tracker.finish()
    (file,) = tracker.directory.iterdir()
    assert file.name.endswith(".mine")
    assert read(tracker.directory).Scalars("a")[0].wall_time == 12.0


def test_what_cannot_be_shown_is_named_and_the_rest_is_logged(tracker: TensorBoardTracker) -> None:
    with pytest.raises(TrackerError, match="'bad': 'Tensor'"):
        tracker.log({"bad": torch.zeros(2), "loss": 3.0}, step=1)
    tracker.finish()
    assert read(tracker.directory).Scalars("loss")[0].value == 3.0


def test_a_second_start_continues_in_the_same_folder(tmp_path: Path) -> None:
    for step in range(2):
        tracker = TensorBoardTracker("p", tmp_path, filename_suffix=str(step))
        tracker.start()
        tracker.log({"loss": float(step)}, step=step)
        tracker.finish()
    assert sorted(e.step for e in read(tracker.directory).Scalars("loss")) == [0, 1]


def test_it_has_to_be_started(tmp_path: Path) -> None:
    with pytest.raises(TrackerError, match=r"call start\(\) first"):
        TensorBoardTracker("p", tmp_path).log({"loss": 1})


def test_other_ranks_write_nothing(tmp_path: Path, rank_1: None) -> None:
    tracker = TensorBoardTracker("p", tmp_path)
    tracker.start()
    tracker.store_init_configuration({"a": 1})
    tracker.log({"loss": 1})
    tracker.log_images({"x": torch.zeros(1, 1, 2, 2)})
    tracker.finish()
    assert list(tmp_path.iterdir()) == []
