"""`accel test` on real processes: its own checks, and a script of the user's on one process and on two."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator, set_seed

accelerator = Accelerator()
set_seed(1)
data = TensorDataset(torch.randn(64, 4))
model = torch.nn.Linear(4, 1)
wrong = float(sys.argv[1]) if accelerator.num_processes > 1 else 0.0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=16 // accelerator.num_processes)
)
for (batch,) in loader:
    accelerator.backward((model(batch) ** 2).mean() + wrong * model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


def accel_test(folder, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "accel_launch", "test", "--cpu", "--num_processes", "2", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.timeout(240)
def test_all_checks_hold_on_two_processes(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("mixed_precision: bf16\nuse_cpu: true\n")
    done = accel_test(tmp_path, "--config_file", str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "2 process(es) on cpu" and lines[-1] == "all 5 checks hold"
    assert "ok     precision: mixed precision 'bf16'" in done.stdout


@pytest.mark.timeout(300)
def test_a_script_is_compared_with_itself_on_one_process(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = accel_test(tmp_path, "--script", "train.py", "--steps", "3", "--", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok: they differ by at most" in done.stdout and len(done.stdout.splitlines()) == 5
    done = accel_test(tmp_path, "--script", "train.py", "--steps", "3", "--", "0.1")
    assert done.returncode == 1 and "FAILED: they differ by at most" in done.stdout, done.stderr


@pytest.mark.timeout(240)
def test_a_script_that_ends_too_early_says_so(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = accel_test(tmp_path, "--script", "train.py", "--steps", "9", "--", "0")
    assert done.returncode == 1 and "ended after 4 updates: 9 were to be compared (--steps)" in done.stderr


def test_what_cannot_be_compared_is_refused(tmp_path):
    done = accel_test(tmp_path, "--script", "absent.py")
    assert done.returncode == 2 and "there is no script 'absent.py'" in done.stderr
