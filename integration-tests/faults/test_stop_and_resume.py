"""SIGTERM in the middle of an epoch: the run saves, leaves with 75, and resumed it ends as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel import STOPPED_EXIT_CODE

TRAIN = Path(__file__).with_name("train.py")
EXAMPLE = TRAIN.parents[2] / "docs" / "examples" / "digits.py"


def launch(folder: Path, *arguments: str | Path, flags: tuple[str, ...] = ()) -> subprocess.Popen:
    command = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--num-processes", "2", *flags]
    with (folder / "log").open("wb") as out:
        return subprocess.Popen(
            [*command, *map(str, arguments)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder)},
        )


def train(folder: Path, flags: tuple[str, ...] = ()) -> subprocess.Popen:
    return launch(folder, TRAIN, folder / "run", "--updates", "60", "--save-every", "1000", "--stoppable", flags=flags)


def wait_for(process: subprocess.Popen, log: Path, text: str) -> None:
    deadline_s = time.monotonic() + 90
    while text not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.01)


def digest(log: Path) -> str:
    return re.search(r"done (\w+)", log.read_text()).group(1)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("flags", [(), ("--max-restarts", "2")], ids=["spawn", "elastic"])
def test_stopped_in_the_middle_of_an_epoch_and_resumed_it_ends_with_the_same_weights(tmp_path, flags):
    disturbed, calm = tmp_path / "disturbed", tmp_path / "calm"
    for folder in (disturbed, calm):
        folder.mkdir()
    process = train(disturbed, flags)
    wait_for(process, disturbed / "log", "update 30\n")  # an epoch has 23 updates
    process.send_signal(signal.SIGTERM)
    assert process.wait(90) == STOPPED_EXIT_CODE, (disturbed / "log").read_text()
    stopped_at = int(re.search(r"stopped at (\d+)", (disturbed / "log").read_text()).group(1))
    assert stopped_at < 60
    assert train(disturbed, flags).wait(90) == 0
    assert f"resumed at {stopped_at}" in (disturbed / "log").read_text()
    assert train(calm).wait(90) == 0
    assert digest(disturbed / "log") == digest(calm / "log")


@pytest.mark.timeout(300)
def test_the_example_stops_at_its_limit_and_resumes(tmp_path):
    arguments = ("--output-dir", tmp_path, "--epochs", "400")
    process = launch(tmp_path, EXAMPLE, *arguments, flags=("--time-limit-s", "3"))
    assert process.wait(120) == STOPPED_EXIT_CODE, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    update = int(re.search(r"stopped at update (\d+); --resume continues", log).group(1))
    assert log.endswith("accel launch: stopped, to be resumed: exit code 75\n")
    process = launch(tmp_path, EXAMPLE, *arguments, "--resume", flags=("--time-limit-s", "1"))
    assert process.wait(120) == STOPPED_EXIT_CODE
    assert f"update {update} of" in (tmp_path / "log").read_text()
