"""The digits job under Debian's Open MPI, started by `accel launch`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DIGITS = Path(__file__).resolve().parents[2] / "docs" / "examples" / "digits.py"


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_digits_job_runs_under_mpirun(tmp_path):
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed: apt-get install openmpi-bin")
    done = subprocess.run(
        [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--num-processes", "2", "--launcher", "mpi", DIGITS],
        cwd=tmp_path,
        env={
            **os.environ,
            **dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMP_NUM_THREADS": "1",
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
