"""The digits job on two nodes of Slurm, made up on this machine: started, told to stop, queued again, finished."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_testkit import slurm_here

DIGITS = Path(__file__).resolve().parents[2] / "docs" / "examples" / "digits.py"
ACCEL = [sys.executable, "-m", "accel_launch"]
LIMIT_S = 200


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    why_not = slurm_here.missing()
    if why_not:
        pytest.skip(why_not)
    with slurm_here.cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield {**environment, "OMP_NUM_THREADS": "1"}


class Job:
    def __init__(self, script: str, folder: Path, environ: dict[str, str]) -> None:
        self.out, self.environ = folder / "out", environ
        (folder / "job.sh").write_text(script)
        command = ["sbatch", "--parsable", "--chdir", str(folder), "--output", str(self.out), str(folder / "job.sh")]
        self.number = self._ask(*command).strip()

    def _ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def signal(self, name: str) -> None:
        self._ask("scancel", "--signal", name, self.number)

    @property
    def printed(self) -> str:
        return self.out.read_text(errors="replace") if self.out.exists() else ""

    def until(self, is_so) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < deadline_s, f"{self.printed}\n{self._ask('scontrol', 'show', 'job', self.number)}"
            time.sleep(0.2)

    @property
    def state(self) -> str:
        return re.search(r"JobState=(\w+)", self._ask("scontrol", "show", "job", self.number)).group(1)


def finished(job: Job) -> str:
    job.until(lambda: job.state not in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED"))
    assert job.state == "COMPLETED", job.printed
    return job.printed


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_job_that_is_told_to_stop_is_queued_again_and_goes_on(tmp_path, environ):
    words = ["--machines", "2", "--processes", "2", "--time", "0:20:00", "--stop-before", "60", "--requeue", "--"]
    words += ["--cpu", "--main-process-ip", "127.0.0.1", str(DIGITS), "--output-dir", str(tmp_path / "runs")]
    words += ["--epochs", "40", "--resume"]
    script = subprocess.run([*ACCEL, "slurm", *words], capture_output=True, text=True, check=True).stdout
    job = Job(script, tmp_path, environ)
    job.until(lambda: any(tmp_path.glob("runs/run-1/checkpoints/*/manifest.json")))
    job.signal("USR1")
    printed = finished(job)
    update = re.search(r"stopped at update (\d+); --resume continues", printed).group(1)
    assert re.search(rf"resumed .* at epoch \d+, update {update} of 880", printed)
    assert re.search(r"test accuracy 9[\d.]+% on 2 process\(es\)", printed)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_batch_script_starts_one_launcher_on_each_node(tmp_path, environ):
    words = ["launch", "--cpu", "--num-processes", "2", "--main-process-ip", "127.0.0.1", str(DIGITS), "--epochs", "2"]
    script = f"#!/bin/bash\n#SBATCH --nodes=2\n{shlex.join([*ACCEL, *words])}\n"
    printed = finished(Job(script, tmp_path, environ))
    assert re.search(r"test accuracy [\d.]+% on 2 process\(es\)", printed)
