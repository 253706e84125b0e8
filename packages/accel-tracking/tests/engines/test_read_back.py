"""Each tracker with its real library, offline: what two processes logged to one run is read from what they wrote."""

from __future__ import annotations

import csv
import json
import sqlite3
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines

LOSSES = {0: 1.0, 1: 0.5, 2: pytest.approx(1 / 3), 7: 0.125}


def pixels(path: Path) -> list[Any]:
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(path).convert("RGB")).flatten().tolist()


PIXELS = [4 * index for index in range(4 * 5 * 3)]


def test_dvclive(reported) -> None:
    folder = reported("dvclive", {"save_dvc_exp": False}).folder / "dvclive"
    with (folder / "plots" / "metrics" / "loss.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert {int(row["step"]): float(row["loss"]) for row in rows} == LOSSES
    metrics = json.loads((folder / "metrics.json").read_text())
    assert (metrics["remark"], metrics["odd"], metrics["step"]) == ("halfway", "nan", 7)
    params = (folder / "params.yaml").read_text()
    assert "lr: 0.1" in params and "api_key: '***'" in params and "hush" not in params
    assert pixels(folder / "plots" / "images" / "5" / "wrong-0.png") == PIXELS


def test_trackio(reported, tmp_path: Path) -> None:
    reported("trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    database = sqlite3.connect(tmp_path / "trackio" / "digits.db")
    rows = [(step, json.loads(text)) for step, text in database.execute("select step, metrics from metrics")]
    assert {step: values["loss"] for step, values in rows if "loss" in values} == LOSSES
    values = dict(rows)
    assert (values[3], values[4]) == ({"remark": "halfway"}, {"odd": "NaN"})
    ((text,),) = database.execute("select config from configs").fetchall()
    database.close()
    config = json.loads(text)
    assert (config["lr"], config["optimizer"], config["api_key"]) == (0.1, {"name": "sgd"}, "***")
    assert pixels(tmp_path / "trackio" / "media" / values[5]["wrong"]["file_path"]) == PIXELS


def test_mlflow(reported, tmp_path: Path) -> None:
    run_id = reported("mlflow", {"logging_dir": str(tmp_path / "store")}).run_id
    database = sqlite3.connect(tmp_path / "store" / "mlflow.db")
    losses = database.execute("select step, value from metrics where key = 'loss' and run_uuid = ?", [run_id])
    assert dict(losses.fetchall()) == LOSSES
    params = dict(database.execute("select key, value from params where run_uuid = ?", [run_id]).fetchall())
    assert (params["lr"], params["optimizer.name"], params["api_key"]) == ("0.1", "sgd", "***")
    assert ("remark", "halfway") in database.execute("select key, value from tags").fetchall()
    database.close()
    artifacts = tmp_path / "store" / "artifacts" / run_id / "artifacts"
    (picture,) = (artifacts / "images").glob("*.png")
    assert pixels(picture) == PIXELS
    table = json.loads((artifacts / "errors.json").read_text())
    assert table == {"columns": ["is", "should", "step"], "data": [[1, 7, 6], [2, 9, 6]]}


def test_comet_ml(reported, tmp_path: Path) -> None:
    run_id = reported("comet_ml", {"online": False}).run_id
    losses, params, others, names = {}, {}, {}, set()
    for archive in (tmp_path / ".cometml-runs").glob(f"{run_id}*.zip"):
        with zipfile.ZipFile(archive) as opened:
            messages = [json.loads(line) for line in opened.read("messages.json").decode().splitlines()]
        for payload in (message["payload"] for message in messages):
            metric, param = payload.get("metric", {}), payload.get("param", {})
            if metric.get("metricName") == "loss":
                losses[metric["step"]] = metric["metricValue"]
            params[param.get("paramName")] = param.get("paramValue")
            others[payload.get("key")] = payload.get("value")
            more = payload.get("additional_params") or {}
            names |= {more.get("figName"), more.get("fileName")}
    assert losses == LOSSES
    assert (params["lr"], params["api_key"], others["remark"]) == (0.1, "***", "halfway")
    assert {"wrong", "errors.csv"} <= names


def test_wandb(reported, tmp_path: Path) -> None:
    done = reported("wandb")
    folders = sorted((tmp_path / "wandb").glob(f"offline-run-*-{done.run_id}"))
    assert len(folders) == 2
    # the values are in a binary log of wandb's own; its summary at the end of each process tells the last of them
    for line in (r"loss 0.33333", r"remark halfway", r"loss 0.125"):
        assert line in done.output
    (picture,) = folders[0].glob("files/media/images/wrong_*.png")
    assert pixels(picture) == PIXELS
    (table,) = folders[0].glob("files/media/table/errors_*.json")
    assert json.loads(table.read_text()) == {"columns": ["is", "should"], "data": [[1, 7], [2, 9]]}
    assert b"hush" not in next(folders[0].glob("*.wandb")).read_bytes()


def test_swanlab(reported, tmp_path: Path) -> None:
    done = reported("swanlab", {"mode": "offline"})
    folders = sorted((tmp_path / "swanlog").glob(f"run-*-{done.run_id}"))
    assert len(folders) == 2
    config = (folders[0] / "files" / "config.yaml").read_text()
    assert "value: 0.1" in config and "value: '***'" in config and "hush" not in config
    (text,) = folders[0].glob("media/text/*.txt")
    assert text.read_text() == "halfway"
    (picture,) = folders[0].glob("media/image/*.png")
    assert pixels(picture) == PIXELS
