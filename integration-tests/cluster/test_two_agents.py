"""Two machines, made up on this one: kill -9 of a rank, then of a machine's launcher, which is started again.

The job goes on by torch elastic from the last committed checkpoint, and ends with the weights of the run that nothing
happened to, bit-equal: it waits for its second machine, so the world size is the same. With more than two ranks that
needs buckets that stay as they are, see docs/decisions/ddp-buckets.md.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

TRAIN = Path(__file__).parent.parent / "faults" / "train.py"
UPDATES = 90
LIMIT_S = 240


def start(folder: Path, port: int, machine: int, ranks: int) -> subprocess.Popen:
    flags = ["--num-machines", "2", "--machine-rank", str(machine), "--main-process-ip", "127.0.0.1"]
    flags += ["--main-process-port", str(port), "--max-restarts", "5", "--rdzv-conf", "last_call_timeout=2"]
    arguments = [str(TRAIN), str(folder / "run"), "--updates", str(UPDATES), "--fixed-buckets"]
    with (folder / f"log{machine}").open("ab") as out:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "accel_launch",
                "launch",
                "--cpu",
                "--num-processes",
                str(ranks),
                *flags,
                *arguments,
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder)},
        )


def wait_for_update(log: Path, update: int, seen: int = 0) -> None:
    """Until the job prints an update beyond this one, in what was written after `seen` bytes."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        found = re.findall(rb"^update (\d+)$", log.read_bytes()[seen:] if log.exists() else b"", re.MULTILINE)
        if found and int(found[-1]) >= update:
            return
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.05)


def ranks_of(launcher: subprocess.Popen) -> list[psutil.Process]:
    family = psutil.Process(launcher.pid).children(recursive=True)
    return [
        one for one in family if str(TRAIN) in one.cmdline() and "-u" in one.cmdline() and "-m" not in one.cmdline()
    ]


def run(folder: Path, ranks: int, disturb: bool) -> str:
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    launchers = [start(folder, port, machine, ranks) for machine in range(2)]
    log = folder / "log0"
    try:
        if disturb:
            wait_for_update(log, 20)
            seen = log.stat().st_size
            ranks_of(launchers[1])[0].send_signal(signal.SIGKILL)
            wait_for_update(log, 40, seen)
            family = psutil.Process(launchers[1].pid).children(recursive=True)
            seen = log.stat().st_size
            launchers[1].kill()
            launchers[1].wait()
            _, alive = psutil.wait_procs(family, timeout=30)
            assert not alive, f"left behind: {alive}"
            launchers[1] = start(folder, port, 1, ranks)
            wait_for_update(log, 60, seen)
        for launcher in launchers:
            assert launcher.wait(LIMIT_S) == 0, log.read_text() + (folder / "log1").read_text()
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    text = log.read_text() + (folder / "log1").read_text()
    assert text.count("resumed at") >= 2 if disturb else "resumed at" not in text, text
    return re.findall(r"^done (\w+)$", text, re.MULTILINE)[-1]


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_killed_rank_and_a_killed_machine_change_nothing(tmp_path, ranks):
    assert run(tmp_path / "disturbed", ranks, disturb=True) == run(tmp_path / "undisturbed", ranks, disturb=False)
