"""The main job as a user runs it: through the launcher, on real data, resumed, and in bf16."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "examples" / "digits.py"


def digits(folder: Path, *arguments: str, processes: int, launch: Sequence[str] = ()) -> str:
    """What the job printed; fails with it if the job fails."""
    command = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--num-processes", str(processes), *launch]
    done = subprocess.run(
        [*command, str(SCRIPT), "--output-dir", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def accuracy(printed: str) -> float:
    return float(re.search(r"test accuracy ([\d.]+)%", printed).group(1))


@pytest.mark.timeout(300)
def test_two_processes_learn_the_digits_and_the_run_resumes(tmp_path):
    printed = digits(tmp_path, processes=2)
    assert accuracy(printed) > 97
    assert "on 2 process(es)" in printed
    run = tmp_path / "run-1"
    for name in ("checkpoints", "mistakes.png"):
        assert str(run / name) in printed
        assert (run / name).exists()
    assert list(run.rglob("events.out.tfevents.*"))
    (file,) = run.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    logged = [line for line in lines if "step" in line]
    assert len(logged) == 15
    assert {"loss", "accuracy", "samples_per_second"} <= json.loads(json.dumps(logged[-1]["values"])).keys()

    again = digits(tmp_path, "--resume", processes=2)
    assert "all 15 epochs are done" in again
    assert accuracy(again) == accuracy(printed)
    prolonged = digits(tmp_path, "--resume", "--epochs", "16", processes=2)
    assert "resumed" in prolonged
    assert accuracy(prolonged) > 97
    assert sum("step" in line for line in map(json.loads, file.read_text().splitlines())) == 16


@pytest.mark.timeout(300)
def test_one_process_in_bf16_learns_them_too(tmp_path):
    printed = digits(tmp_path, "--mixed-precision", "bf16", "--epochs", "6", processes=1)
    assert accuracy(printed) > 95
    assert "on 1 process(es)" in printed


@pytest.mark.timeout(300)
def test_a_run_that_was_cut_short_goes_on_on_another_number_of_processes(tmp_path):
    digits(tmp_path, "--epochs", "4", processes=2)  # 88 updates; checkpoints at 66, 80 and 88 are kept
    checkpoints = tmp_path / "run-1" / "checkpoints"
    *_, before_last, last = sorted(checkpoints.iterdir(), key=lambda path: int(path.name.rpartition("_")[2]))
    shutil.rmtree(last)
    assert json.loads((before_last / "manifest.json").read_text())["manifest"]["world_size"] == 2
    printed = digits(tmp_path, "--epochs", "4", "--resume", processes=1)
    assert "at epoch 3, update 80 of 88" in printed
    assert "on 1 process(es)" in printed
    assert accuracy(printed) > 90


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("launch", "arguments"),
    [
        (["--use_fsdp", "--fsdp_version", "2"], []),
        ([], ["--tp", "2"]),
        pytest.param([], ["--fsdp"], marks=pytest.mark.parity),
    ],
)
def test_processes_that_share_a_model_learn_them_and_one_goes_on(tmp_path, launch, arguments):
    assert accuracy(digits(tmp_path, *arguments, processes=2, launch=launch)) > 97
    alone = digits(tmp_path, "--resume", "--epochs", "16", processes=1)
    assert "at epoch 15, update 330 of 352" in alone
    assert accuracy(alone) > 97


@pytest.mark.parity
@pytest.mark.timeout(300)
def test_four_processes_share_it_both_ways(tmp_path):
    assert accuracy(digits(tmp_path, "--fsdp", "--tp", "2", processes=4)) > 97
