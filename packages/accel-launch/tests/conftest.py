"""The `accel` command in a process of its own, and processes that must be gone."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

# Ranks of these tests import nothing; what the outside set must not change what they see.
FOREIGN = (
    "ACCEL_",
    "ACCELERATE_",
    "SLURM_",
    "XDG_",
    "HF_",
    "OMP_NUM_THREADS",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "CUDA_VIS",
)


class Accel:
    """Runs `accel` in a folder of the test's own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environ = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
        self.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same on every machine
        self.environ["HOME"] = str(folder / "home")  # nobody's configuration file

    def script(self, code: str, name: str = "train.py") -> Path:
        """Write a script and return its path."""
        path = self.folder / name
        path.write_text(textwrap.dedent(code))
        return path

    def start(self, *arguments: str | Path, env: dict[str, str] | None = None, **options) -> subprocess.Popen:
        """Start `accel ARGUMENTS` without waiting."""
        defaults = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": self.folder}
        command = [sys.executable, "-m", "accel_launch", *map(str, arguments)]
        return subprocess.Popen(
            command,
            env={**self.environ, **(env or {})},
            preexec_fn=hear_ctrl_c,  # noqa: PLW1509  the tests have one thread
            **(defaults | options),
        )

    def __call__(self, *arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
        """Run `accel ARGUMENTS` to its end."""
        with self.start(*arguments, env=env) as process:
            out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def pids(self, count: int) -> list[int]:
        """The numbers that scripts left in files `*.pid`, once there are so many."""
        return [int(path.suffixes[0][1:]) for path in self.found("*.pid", count)]

    def found(self, pattern: str, count: int) -> list[Path]:
        """The files that scripts left, once there are so many."""
        wait_until(lambda: len(list(self.folder.glob(pattern))) >= count)
        return sorted(self.folder.glob(pattern))


def hear_ctrl_c() -> None:
    """Whoever starts the tests in the background of a shell ignores Ctrl-C, and what was ignored stays so."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_until(condition, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"it did not happen within {timeout_s} s"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.fixture
def accel(tmp_path):
    return Accel(tmp_path)


@pytest.fixture
def gone():
    """Wait until none of some processes lives."""

    def check(pids, timeout_s: float = 10.0):
        wait_until(lambda: not any(is_alive(pid) for pid in pids), timeout_s)

    return check


@pytest.fixture
def sleepers(accel):
    """A script whose ranks start a helper each, leave the numbers of both, and wait for very long."""
    return accel.script("""
        import os, pathlib, subprocess, sys, time
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        for name, pid in (("rank", os.getpid()), ("helper", helper.pid)):
            pathlib.Path(f"{name}{os.environ.get('RANK', 0)}.{pid}.pid").touch()
        time.sleep(300)
    """)
