"""Ray places the ranks and starts them: the digits job, an error, a signal, a killed launcher.

`tools/dev test --cluster` makes an environment that has Ray, and names its interpreter by `ACCEL_TEST_RAY_PYTHON`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

DIGITS = Path(__file__).resolve().parents[2] / "docs" / "examples" / "digits.py"
PYTHON = os.environ.get("ACCEL_TEST_RAY_PYTHON", "")
# Ray's own, for a machine that is busy; `RAY_TMPDIR` has to be short: sockets lie there
PATIENCE = {"RAY_raylet_start_wait_time_s": "240", "RAY_agent_register_timeout_ms": "240000"}
LIMIT_S = 300

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="Ray's environment is made by tools/dev test --cluster"),
]


@contextmanager
def launched(folder: Path, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
    command = [PYTHON, "-m", "accel_launch", "launch", "--cpu", "--launcher", "ray", "--num-processes", "2", *words]
    environment = {**os.environ, **PATIENCE, "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def test_the_digits_job_runs_by_ray(tmp_path: Path) -> None:
    with launched(tmp_path, DIGITS, "--epochs", "2") as launcher:
        out, err = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 0, err
    assert re.search(r"test accuracy [\d.]+% on 2 process\(es\)", out), out


def script(folder: Path, code: str) -> Path:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(code))
    return path


def test_the_first_failure_ends_the_others_and_its_code_is_kept(tmp_path: Path) -> None:
    code = """
        import os, sys, time
        if os.environ["RANK"] == "1":
            print("the real cause", file=sys.stderr)
            sys.exit(7)
        time.sleep(600)
    """
    with launched(tmp_path, script(tmp_path, code)) as launcher:
        _, err = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 7
    assert err.endswith("accel launch: rank 1 of 2 failed first: exit code 7\nthe real cause\n")


def test_a_signal_reaches_the_ranks_and_a_kill_takes_them_along(tmp_path: Path) -> None:
    code = """
        import os, pathlib, signal, sys, time
        def leave(signum, frame):
            time.sleep(0.5 * int(os.environ["RANK"]))
            print("saved", flush=True)
            sys.exit(75)
        signal.signal(signal.SIGTERM, leave)
        pathlib.Path(f"rank.{os.getpid()}.pid").touch()
        time.sleep(600)
    """
    path = script(tmp_path, code)
    with launched(tmp_path, path) as launcher:
        pids(tmp_path)
        launcher.terminate()
        out, err = launcher.communicate(timeout=LIMIT_S)
    assert (launcher.returncode, out.count("saved")) == (75, 2), err
    for found in tmp_path.glob("rank.*.pid"):
        found.unlink()
    with launched(tmp_path, path) as launcher:
        ranks = pids(tmp_path)
        family = psutil.Process(launcher.pid).children(recursive=True)
        launcher.send_signal(signal.SIGKILL)
        launcher.communicate(timeout=LIMIT_S)
        _, alive = psutil.wait_procs([*ranks, *family], timeout=60)
        assert not alive, f"left behind: {alive}"


def pids(folder: Path) -> list[psutil.Process]:
    deadline_s = time.monotonic() + LIMIT_S
    while len(found := list(folder.glob("rank.*.pid"))) < 2:
        assert time.monotonic() < deadline_s, "the ranks did not start"
        time.sleep(0.1)
    return [psutil.Process(int(path.suffixes[0][1:])) for path in found]
