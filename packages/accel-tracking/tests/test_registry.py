from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_state.errors import MissingExtraError, TrackerError
from accel_tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    JsonlTracker,
    LoggerType,
    TensorBoardTracker,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
    registry,
)


class Mine(GeneralTracker):
    name = "mine"
    requires_logging_directory = False
    tracker = None


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    for name, kind in list(LOGGER_TYPE_TO_CLASS.items()):
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, kind)
    monkeypatch.delitem(LOGGER_TYPE_TO_CLASS, "mine", raising=False)


def test_our_trackers_are_found_by_their_entry_points() -> None:
    assert LOGGER_TYPE_TO_CLASS["jsonl"] is JsonlTracker
    assert LOGGER_TYPE_TO_CLASS["tensorboard"] is TensorBoardTracker
    assert set(get_available_trackers()) >= {LoggerType.JSONL, LoggerType.TENSORBOARD}


def test_every_way_to_name_a_tracker() -> None:
    instance = Mine()
    assert filter_trackers(None) == []
    assert filter_trackers("jsonl") == [LoggerType.JSONL] == ["jsonl"]
    assert filter_trackers(LoggerType.TENSORBOARD, "somewhere") == [LoggerType.TENSORBOARD]
    assert filter_trackers([Mine, "jsonl"]) == [Mine, LoggerType.JSONL]
    assert filter_trackers(instance) == [instance]
    assert filter_trackers(["jsonl", LoggerType.JSONL, "tensorboard"]) == ["jsonl", "tensorboard"]


def test_all_means_those_that_are_available_and_combines_with_own_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorBoardTracker, "requires_package", "a_package_that_is_not_installed")
    instance = Mine()
    assert "tensorboard" not in get_available_trackers()
    assert filter_trackers(["all", instance, "jsonl"]) == [*get_available_trackers(), instance]


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(TrackerError, match=r"'tensorbord'.*did you mean 'tensorboard'"):
        filter_trackers("tensorbord")
    with pytest.raises(ValueError, match="of type int"):
        filter_trackers([3])


def test_one_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorBoardTracker, "requires_package", "a_package_that_is_not_installed")
    with pytest.raises(MissingExtraError, match=r"accel-tracking\[tensorboard\]"):
        filter_trackers("tensorboard")


def test_every_tracker_of_the_peer_is_known_and_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LoggerType.list()[1:]:
        kind = LOGGER_TYPE_TO_CLASS[name]
        assert kind.name == name
        if kind.requires_package is not None:
            monkeypatch.setattr(kind, "requires_package", "a_package_that_is_not_installed")
            with pytest.raises(MissingExtraError, match=rf"accel-tracking\[{name}\]"):
                filter_trackers(name)


def test_registering_a_class(caplog: pytest.LogCaptureFixture) -> None:
    register_tracker_class(Mine)
    register_tracker_class(Mine)
    assert filter_trackers("mine") == ["mine"]
    assert "mine" in get_available_trackers()
    assert caplog.records == []
    register_tracker_class(type("Other", (Mine,), {}))
    assert "the tracker 'mine' is now" in caplog.text


@pytest.mark.parametrize(
    "bad", [int, Mine(), type("All", (Mine,), {"name": "all"}), type("None_", (Mine,), {"name": None})]
)
def test_registering_something_else_is_refused(bad: Any) -> None:
    with pytest.raises(TrackerError):
        register_tracker_class(bad)


def test_a_plugin_is_found_and_a_broken_one_takes_nobody_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[accel.trackers]\nfine = plugin_tracker:Fine\nbroken = no_such_module:X\n")
    (tmp_path / "plugin_tracker.py").write_text(
        "from accel_tracking import GeneralTracker\n"
        "class Fine(GeneralTracker):\n    name = 'fine'\n    requires_logging_directory = False\n    tracker = None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    classes = registry._load_entry_points()
    assert classes["fine"].name == "fine"
    assert classes["jsonl"] is JsonlTracker
    assert "the tracker 'broken' (no_such_module:X) cannot be loaded" in caplog.text


def test_logger_type_has_the_peers_members_and_ours() -> None:
    names = {"ALL", "AIM", "TENSORBOARD", "WANDB", "TRACKIO", "COMETML", "MLFLOW", "CLEARML", "DVCLIVE", "SWANLAB"}
    assert set(LoggerType.__members__) == names | {"JSONL"}
    assert str(LoggerType.COMETML) == "comet_ml" in LoggerType.list()
    assert "wandb" in LoggerType and LoggerType.JSONL in LoggerType
    assert "WANDB" not in LoggerType and 3 not in LoggerType


def test_the_registry_loads_neither_torch_nor_a_trackers_library() -> None:
    script = (
        "import sys, accel_tracking; accel_tracking.get_available_trackers();"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'tensorboard', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
