"""What each library wrote is read back: by the library where it can read, else from its files.

`report.py` logs, in a first process, `loss` 1, 1/2, 1/3 and `train/count` 0, 1, 2 at steps 0 to 2, the text `halfway`
at 3, NaN at 4, a picture at 5, a table at 6; and in a second one, which goes on with the run, `loss` 1/8 at step 7.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sqlite3
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own, while they read
    pytest.mark.timeout(1000),
]

THIRD = pytest.approx(1 / 3)
LOSS = {0: 1.0, 1: 0.5, 2: THIRD, 7: 0.125}
COUNT = {0: 0, 1: 1, 2: 2}
PIXELS = bytes(value * 4 for value in range(4 * 5 * 3))

Report = Callable[..., Any]


def pixels_of(picture: Any) -> bytes:
    """The bytes of a PNG file, its path, or Pillow's image: 4 rows of 5 pixels in 3 colours."""
    from PIL import Image

    opened = picture if hasattr(picture, "size") else Image.open(picture)
    assert opened.size == (5, 4)
    return opened.convert("RGB").tobytes()


def log_records(path: Path) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, after seven bytes that name the program."""
    content, position, whole = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:  # too little for a header: the block's end is padding
            position += left
            continue
        _checksum, length, kind = struct.unpack("<IHB", content[position : position + 7])
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a record's only or last part
            yield whole
            whole = b""


def test_wandb(reported: Report) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    run = reported("wandb")
    config, rows = {}, []
    for file in sorted(run.folder.glob(f"wandb/offline-run-*/run-{run.run_id}.wandb")):
        for content in log_records(file):
            record = Record.FromString(content)
            config |= {item.key: json.loads(item.value_json) for item in record.config.update}
            if record.HasField("history"):
                items = record.history.item
                rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    assert config == {
        "lr": 0.1, "optimizer": {"name": "sgd"}, "folder": "a/b", "note": None, "api_key": "***"
    }  # fmt: skip
    assert {row["_step"]: row["loss"] for row in rows if "loss" in row} == LOSS
    assert {row["_step"]: row["train/count"] for row in rows if "train/count" in row} == COUNT
    assert [row["_step"] for row in rows if row.get("remark") == "halfway"] == [3]
    assert [row["_step"] for row in rows if math.isnan(row.get("odd", 0))] == [4]
    (picture,) = next(row["wrong/filenames"] for row in rows if row["_step"] == 5)
    assert pixels_of(next(run.folder.glob(f"wandb/*/files/{picture}"))) == PIXELS
    table = json.loads(next(run.folder.glob("wandb/offline-run-*/files/media/table/errors*.json")).read_text())
    assert (table["columns"], table["data"]) == (["is", "should"], [[1, 7], [2, 9]])
    assert run.library == "wandb.sdk.wandb_run.Run"


def test_trackio(reported: Report, tmp_path: Path) -> None:
    options = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    run = reported("trackio", options, TRACKIO_DIR=str(tmp_path / "trackio"))
    database = sqlite3.connect(tmp_path / "trackio" / "digits.db")
    rows = {
        step: json.loads(values)
        for step, values in database.execute(
            "select step, metrics from metrics where run_name = ? order by id", [run.run_id]
        )
    }
    ((config,),) = database.execute("select config from configs").fetchall()
    database.close()
    config = {key: value for key, value in json.loads(config).items() if not key.startswith("_")}
    assert config == {
        "lr": 0.1, "optimizer": {"name": "sgd"}, "folder": "a/b", "note": None, "api_key": "***"
    }  # fmt: skip
    assert {step: row["loss"] for step, row in rows.items() if "loss" in row} == LOSS
    assert {step: row["train/count"] for step, row in rows.items() if "train/count" in row} == COUNT
    assert rows[3] == {"remark": "halfway"}
    assert math.isnan(float(rows[4]["odd"]))
    assert pixels_of(tmp_path / "trackio" / "media" / rows[5]["wrong"]["file_path"]) == PIXELS


def test_aim(reported: Report) -> None:
    run = reported("aim", {"system_tracking_interval": None, "capture_terminal_logs": False})
    # a repository without a running aim has no index, and lists no run until it is made
    reindex = "from aim.cli.cli import cli_entry_point as aim; aim()"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", reindex, "storage", "--repo", str(run.folder), "reindex", "-y"],
        check=True,
        capture_output=True,
        timeout=120,
    )
    from aim import Repo
    from aim.storage.context import Context

    (read,) = [Repo(str(run.folder)).get_run(run.run_id)]
    assert read.name == "digits"
    assert read["hparams"] == {
        "lr": 0.1, "optimizer": {"name": "sgd"}, "folder": "a/b", "note": None, "api_key": "***"
    }  # fmt: skip

    def values(name: str) -> dict[int, float]:
        frame = read.get_metric(name, Context({})).dataframe()
        return dict(zip(frame["step"].tolist(), frame["value"].tolist(), strict=True))

    assert values("loss") == LOSS
    assert values("train/count") == COUNT
    assert math.isnan(values("odd")[4])
    (step,), ((text,), *_) = read.get_text_sequence("remark", Context({})).data.items_list()
    assert (step, text.data) == (3, "halfway")
    (step,), ((picture,), *_) = read.get_image_sequence("wrong", Context({})).data.items_list()
    assert (step, pixels_of(picture.to_pil_image())) == (5, PIXELS)


def test_comet_ml(reported: Report, tmp_path: Path) -> None:
    run = reported("comet_ml", {"online": False}, COMET_OFFLINE_DIRECTORY=str(tmp_path / "comet"))
    archives = sorted((tmp_path / "comet").glob(f"{run.run_id}-*.zip"), key=lambda path: path.stat().st_mtime)
    assert len(archives) == 2
    metrics, parameters, others, uploads = [], {}, {}, {}
    for path in archives:
        with zipfile.ZipFile(path) as archive:
            assert json.loads(archive.read("experiment.json"))["project_name"] == "digits"
            for message in map(json.loads, archive.read("messages.json").splitlines()):
                payload = message["payload"]
                if message["type"] == "metric_msg":
                    metrics.append(payload["metric"])
                elif message["type"] == "parameter_msg":
                    parameters[payload["param"]["paramName"]] = payload["param"]["paramValue"]
                elif message["type"] == "log_other":
                    others[payload["key"]] = payload["value"]
                elif message["type"] == "file_upload":
                    name = payload["additional_params"].get("figName") or payload["additional_params"].get("fileName")
                    step = payload["additional_params"].get("step")
                    uploads[name] = (step, archive.read(payload["file_path"]))

    def values(name: str) -> dict[int, float]:
        return {metric["step"]: metric["metricValue"] for metric in metrics if metric["metricName"] == name}

    assert {name: parameters[name] for name in ("lr", "optimizer|name", "folder", "note", "api_key")} == {
        "lr": 0.1, "optimizer|name": "sgd", "folder": "a/b", "note": None, "api_key": "***"
    }  # fmt: skip
    assert values("loss") == LOSS
    assert values("train/count") == COUNT
    assert math.isnan(float(values("odd")[4]))
    assert others["remark"] == "halfway"
    step, picture = uploads["wrong"]
    assert (step, pixels_of(io.BytesIO(picture))) == (5, PIXELS)
    step, table = uploads["errors.csv"]
    assert (step, list(csv.reader(io.StringIO(table.decode())))) == (6, [["is", "should"], ["1", "7"], ["2", "9"]])


def test_mlflow(reported: Report, tmp_path: Path) -> None:
    run = reported("mlflow", {"logging_dir": "mlflow"})
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}")
    read = client.get_run(run.run_id)
    assert read.info.status == "FINISHED"
    assert client.get_experiment(read.info.experiment_id).name == "digits"
    assert read.data.params == {
        "lr": "0.1", "optimizer.name": "sgd", "folder": "a/b", "note": "None", "api_key": "***"
    }  # fmt: skip

    def values(name: str) -> dict[int, float]:
        return {metric.step: metric.value for metric in client.get_metric_history(run.run_id, name)}

    assert values("loss") == LOSS
    assert values("train/count") == COUNT
    assert math.isnan(values("odd")[4])
    assert read.data.tags["remark"] == "halfway"
    (picture,) = (tmp_path / "mlflow").rglob("wrong+step+5+*.png")
    assert pixels_of(picture) == PIXELS
    (table,) = (tmp_path / "mlflow").rglob("errors.json")
    assert json.loads(table.read_text()) == {"columns": ["is", "should", "step"], "data": [[1, 7, 6], [2, 9, 6]]}
    assert run.library == "mlflow.tracking.fluent.ActiveRun"


def test_clearml(reported: Report, tmp_path: Path) -> None:
    # no second process: see docs/trackers.md
    options = "detect_with_pip_freeze: true, report_use_subprocess: false, store_uncommitted_code_diff: false"
    (tmp_path / "clearml.conf").write_text(f"sdk {{ development {{ {options} }} }}\n")
    run = reported(
        "clearml",
        {"auto_resource_monitoring": False, "auto_connect_frameworks": False},
        CLEARML_OFFLINE_MODE="1",
        CLEARML_CACHE_DIR=str(tmp_path / "clearml"),
        CLEARML_CONFIG_FILE=str(tmp_path / "clearml.conf"),
    )
    with zipfile.ZipFile(tmp_path / "clearml" / "offline" / f"{run.run_id}.zip") as archive:
        task = json.loads(archive.read("task.json"))
        events = [event for line in archive.read("metrics.jsonl").splitlines() for event in json.loads(line)]
        log = [event["msg"] for line in archive.read("log.jsonl").splitlines() for event in json.loads(line)]
        (picture,) = [archive.read(name) for name in archive.namelist() if name.endswith(".jpeg")]

    def values(title: str, series: str) -> dict[int, float]:
        scalars = [event for event in events if event["type"] == "training_stats_scalar"]
        return {e["iter"]: e["value"] for e in scalars if (e["metric"], e["variant"]) == (title, series)}

    assert task["project_name"] == "digits"
    assert re.sub(r"\s+", " ", task["configuration"]["General"]["value"]) == (
        'lr = 0.1 optimizer { name = "sgd" } folder = "a/b" note = null api_key = "***"'
    )
    assert values("loss", "loss") == LOSS
    assert values("train", "count") == COUNT
    assert "remark at step 3: halfway" in "\n".join(log) and "odd at step 4: NaN" in "\n".join(log)
    shown = pixels_of(io.BytesIO(picture))
    assert max(abs(is_ - should) for is_, should in zip(shown, PIXELS, strict=True)) < 40  # JPEG
    (table,) = [json.loads(event["plot_str"])["data"][0] for event in events if event["type"] == "plot"]
    assert (table["header"]["values"], table["cells"]["values"]) == (["is", "should"], [[1, 2], [7, 9]])


def test_dvclive(reported: Report) -> None:
    import yaml

    run = reported("dvclive", {"dir": "live", "save_dvc_exp": False, "dvcyaml": None})
    folder = run.folder / "live"

    def values(name: str) -> dict[int, str]:
        with (folder / "plots" / "metrics" / f"{name}.tsv").open() as file:
            return {int(step): value for step, value in list(csv.reader(file, delimiter="\t"))[1:]}

    assert yaml.safe_load((folder / "params.yaml").read_text()) == {
        "lr": 0.1, "optimizer": {"name": "sgd"}, "folder": "a/b", "note": None, "api_key": "***"
    }  # fmt: skip
    assert {step: float(value) for step, value in values("loss").items()} == LOSS
    assert {step: int(value) for step, value in values("train/count").items()} == COUNT
    assert values("remark") == {3: "halfway"}
    assert math.isnan(float(values("odd")[4]))
    assert json.loads((folder / "metrics.json").read_text())["loss"] == 0.125
    assert pixels_of(folder / "plots" / "images" / "5" / "wrong-0.png") == PIXELS


def test_swanlab(reported: Report) -> None:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    run = reported("swanlab", {"mode": "offline", "log_dir": "swanlab"})
    files = sorted(run.folder.glob(f"swanlab/run-*/run-{run.run_id}.swanlab"))
    assert len(files) == 2
    records = [Record.FromString(content) for file in files for content in log_records(file)]
    config = yaml.safe_load((files[0].parent / "files" / "config.yaml").read_text())
    assert {name: entry["value"] for name, entry in config.items()} == {
        "lr": 0.1, "optimizer": {"name": "sgd"}, "folder": "a/b", "note": {}, "api_key": "***"
    }  # fmt: skip
    scalars = [record.scalar for record in records if record.HasField("scalar")]

    def values(name: str) -> dict[int, float]:
        return {scalar.step: scalar.value.number for scalar in scalars if scalar.key == name}

    assert values("loss") == LOSS
    assert values("train/count") == COUNT
    assert math.isnan(values("odd")[4])
    media = {record.media.key: record.media for record in records if record.HasField("media")}
    names = {name: (entry.step, entry.value.items[0].filename) for name, entry in media.items()}
    step, text = names["remark"]
    assert (step, (files[0].parent / "media" / "text" / text).read_text()) == (3, "halfway")
    step, picture = names["wrong"]
    assert (step, pixels_of(files[0].parent / "media" / "image" / picture)) == (5, PIXELS)


def test_every_tracker_is_available_here() -> None:
    from accel_tracking import LoggerType, filter_trackers

    assert sorted(filter_trackers("all")) == sorted(LoggerType.list()[1:])
