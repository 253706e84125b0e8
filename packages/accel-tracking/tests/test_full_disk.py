"""A limit on the size of files stands for a full disk: writes fail with an OSError from some byte on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import logging, resource, sys
from accel_tracking import TrackerSet

logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
trackers = TrackerSet(sys.argv[1], sys.argv[2])
trackers.init("p", {"lr": 0.1})
trackers.log({"loss": 0.0}, step=0)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
for step in range(1, 200):
    trackers.log({"loss": float(step)}, step=step)
if sys.argv[3] == "room again":
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
trackers.finish()
print("trained to the end")
"""


def run(tracker: str, folder: Path, ending: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tracker, str(folder), ending],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("trained to the end\n")
    return done.stdout


def test_jsonl_says_so_once_and_has_every_line_when_there_is_room_again(tmp_path: Path) -> None:
    output = run("jsonl", tmp_path, "room again")
    assert output.count("the tracker 'jsonl' failed in log()") == 1
    lines = [json.loads(line) for line in (tmp_path / "p" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "values" in line] == list(range(200))


@pytest.mark.parametrize("tracker", ["jsonl", "tensorboard"])
def test_a_disk_that_stays_full_stops_nobody(tmp_path: Path, tracker: str) -> None:
    assert f"the tracker '{tracker}' failed" in run(tracker, tmp_path, "full")
