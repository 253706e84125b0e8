"""Debian's Open MPI, started by `accel launch`: the digits job, and a run that is told to stop and resumed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "docs" / "examples" / "digits.py"
TRAIN = ROOT / "integration-tests" / "faults" / "train.py"
LIMIT_S = 240

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed: apt-get install openmpi-bin"),
]


def launched(folder: Path, *words: str | Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--num-processes", "2", "--launcher", "mpi"]
    with (folder / "log").open("wb") as out:
        return subprocess.Popen(
            [*command, "--grace-s", "60", *words],
            cwd=folder,
            env={
                **os.environ,
                **dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
                "OMPI_MCA_rmaps_base_oversubscribe": "1",
                "OMP_NUM_THREADS": "1",
                "HOME": str(folder),
            },
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def test_the_digits_job_runs_under_mpirun(tmp_path: Path) -> None:
    process = launched(tmp_path, DIGITS)
    assert process.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
    assert "test accuracy" in (tmp_path / "log").read_text()


def test_sigterm_to_the_launcher_stops_the_run_which_goes_on_later(tmp_path: Path) -> None:
    words = (TRAIN, tmp_path / "run", "--updates", "60", "--save-every", "1000", "--stoppable")
    log = tmp_path / "log"
    process = launched(tmp_path, *words)
    deadline_s = time.monotonic() + LIMIT_S
    while "update 30\n" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 75, log.read_text()
    stopped_at = re.search(r"stopped at (\d+)", log.read_text())
    assert stopped_at, log.read_text()
    assert launched(tmp_path, *words).wait(LIMIT_S) == 0, log.read_text()
    assert f"resumed at {stopped_at.group(1)}" in log.read_text()
