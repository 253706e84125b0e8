"""Killed with -9 at any moment and resumed, a run ends with the weights of the run that was never killed.

The core tier kills a few times; `--faults` (ACCEL_TEST_FAULTS=1) kills twenty times with 0 and with 2 workers.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

TRAIN = Path(__file__).with_name("train.py")
FULL = "ACCEL_TEST_FAULTS" in os.environ
KILLS = 10 if FULL else 2
MAX_UPDATES_BETWEEN_KILLS = 50
UPDATES = KILLS * MAX_UPDATES_BETWEEN_KILLS + 100  # enough that the run is still going on at the last kill
SAVE_EVERY = 5
LIMIT_S = 300  # of a whole run, about 13 s on two idle cores: only a run that hangs takes so long


@dataclass
class Outcome:
    digest: str = ""
    kills: int = 0
    inside_a_save: int = 0
    resumed_at: list[int] = field(default_factory=list)


def launch(folder: Path, log: Path, workers: int, save_every: int) -> subprocess.Popen:
    arguments = [str(TRAIN), str(folder), "--updates", str(UPDATES), "--num-workers", str(workers)]
    arguments += ["--save-every", str(save_every)]
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--num-processes", "2", *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def kill_all(process: subprocess.Popen, rng: random.Random) -> None:
    """kill -9 of the launcher or of one rank; the others have to follow by themselves."""
    parent = psutil.Process(process.pid)
    family = parent.children(recursive=True)
    ranks = [child for child in parent.children() if "launch" not in child.cmdline()]  # not the launcher's guard
    assert len(ranks) == 2, ranks
    victim = rng.choice([parent, *ranks])
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, f"left behind: {alive}"


def finish(process: subprocess.Popen, log: Path) -> None:
    """Wait for the end of a run; where it does not come, tell what every process of it is doing."""
    try:
        assert process.wait(timeout=LIMIT_S) == 0, log.read_text()
    except subprocess.TimeoutExpired:
        family = psutil.Process(process.pid).children(recursive=True)
        tree = "\n".join(f"{one.pid} of {one.ppid()}: {one.status()} {one.cmdline()}" for one in family)
        for one in family:
            if str(TRAIN) in one.cmdline() and "launch" not in one.cmdline():
                one.send_signal(signal.SIGUSR1)
        time.sleep(2)
        told = "\n".join(line for line in log.read_text().splitlines() if not line.startswith("update"))
        raise AssertionError(f"no end after {LIMIT_S} s:\n{tree}\nstacks of ranks and workers:\n{told}") from None


def wait_for(condition, process: subprocess.Popen, log: Path, pause_s: float = 0.0002) -> bool:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        if condition():
            return True
        if process.poll() is not None:
            return False
        time.sleep(pause_s)
    raise AssertionError(f"nothing happened for 90 s:\n{log.read_text()}")


def run_with_kills(folder: Path, tmp_path: Path, workers: int, kills: int, seed: int) -> Outcome:
    """Start, kill, start again … then let the run finish. Without kills it also does without most of the saves."""
    rng = random.Random(seed)
    outcome = Outcome()
    checkpoints = folder / "checkpoints"
    for attempt in range(kills + 1):
        log = tmp_path / f"log-{attempt}"
        process = launch(folder, log, workers, SAVE_EVERY if kills else UPDATES // 2)
        try:
            if outcome.kills < kills and strike(process, log, checkpoints, rng, outcome):
                continue
            finish(process, log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            outcome.resumed_at += [int(number) for number in re.findall(r"resumed at (\d+)", log.read_text())]
        outcome.digest = re.search(r"done (\w+)", log.read_text()).group(1)
        return outcome
    raise AssertionError("the last attempt did not finish")


def strike(process, log: Path, checkpoints: Path, rng: random.Random, outcome: Outcome) -> bool:
    """Kill once, some updates after the start: at a random moment, or while a save is being written."""
    wanted = rng.randint(1, MAX_UPDATES_BETWEEN_KILLS)

    def came_far_enough() -> bool:
        return log.read_bytes().count(b"update ") >= wanted

    def saving() -> bool:
        return checkpoints.is_dir() and any(".accel-staging-" in path.name for path in checkpoints.iterdir())

    inside = rng.random() < 0.6
    if not wait_for(came_far_enough, process, log) or (inside and not wait_for(saving, process, log)):
        return False
    time.sleep(rng.random() * (0.003 if inside else 0.03))
    if process.poll() is not None:
        return False
    kill_all(process, rng)
    outcome.kills += 1
    outcome.inside_a_save += saving()  # the staging folder is still there: the save did not end before the kill
    return True


@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path, workers):
    undisturbed = run_with_kills(tmp_path / "undisturbed", tmp_path, workers, kills=0, seed=0)
    killed = run_with_kills(tmp_path / "killed", tmp_path, workers, kills=KILLS, seed=workers)
    print(f"workers={workers}: {killed}")
    assert killed.kills == KILLS
    if FULL:
        assert killed.inside_a_save >= 3
        assert len(killed.resumed_at) >= KILLS // 2
    assert killed.digest == undisturbed.digest
