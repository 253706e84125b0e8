"""Ctrl-C, SIGTERM, and the launcher's sudden death: nobody is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def launched(accel, *flags, script="train.py", **options):
    return accel.start("launch", "--cpu", "--num_processes", "2", *flags, script, **options)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=str
)
def test_a_signal_ends_all(accel, sleepers, gone, signum, code):
    with launched(accel) as process:
        pids = accel.pids(4)
        process.send_signal(signum)
        _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert f"accel launch: ended by {signum.name}" in err
    assert "failed first" not in err
    gone(pids, timeout_s=2)


def test_it_is_handed_on_once_and_a_good_end_stays_good(accel):
    accel.script("""
        import os, pathlib, signal, sys, time
        seen = []
        signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
        pathlib.Path(f"rank.{os.getpid()}.pid").touch()
        while not seen:
            time.sleep(0.01)
        time.sleep(0.3)  # saves a checkpoint
        print(len(seen))
    """)
    with launched(accel) as process:
        accel.pids(2)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "1\n1\n")


def test_open_mpi_hears_sigterm_as_the_signal_that_it_hands_on(accel):
    accel.script("")
    mpirun = accel.folder / "mpirun"
    told = 'trap "echo told; exit 75" USR1; touch x.$$.pid; while :; do sleep 0.05; done'
    mpirun.write_text(f'#!/bin/sh\n[ "$1" != --version ] || {{ echo "mpirun (Open MPI) 4.1.4"; exit; }}\n{told}\n')
    mpirun.chmod(0o755)
    with launched(accel, "--launcher", "mpi", env={"PATH": f"{accel.folder}:{os.environ['PATH']}"}) as process:
        accel.pids(1)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (75, "told\n")


def test_a_second_ctrl_c_kills_at_once(accel, gone):
    accel.script("""
        import os, pathlib, signal, time
        signal.signal(signal.SIGINT, lambda *_: pathlib.Path(f"told{os.environ['RANK']}").touch())
        pathlib.Path(f"rank.{os.getpid()}.pid").touch()
        while True:
            time.sleep(1)
    """)
    with launched(accel, "--grace_s", "100") as process:
        pids = accel.pids(2)
        process.send_signal(signal.SIGINT)
        accel.found("told*", 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 137
        process.communicate()
    gone(pids, timeout_s=2)


def test_ctrl_c_during_the_start_leaves_nobody(accel, gone):
    accel.script("import os, pathlib, time; pathlib.Path(f'x.{os.getpid()}.pid').touch(); time.sleep(300)")
    for delay_s in (0.03, 0.05, 0.07, 0.09):
        with launched(accel) as process:
            time.sleep(delay_s)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=20)
        assert process.returncode != 0
    gone([int(path.suffixes[0][1:]) for path in accel.folder.glob("*.pid")], timeout_s=2)


def test_what_was_ignored_stays_ignored(accel, sleepers, gone):
    command = ["nohup", sys.executable, "-m", "accel_launch", "launch", "--cpu", "--num_processes", "2", "train.py"]
    devnull = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=accel.folder, env=accel.environ, **devnull) as process:
        pids = accel.pids(4)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert process.poll() is None
        process.terminate()
        process.wait(20)
    gone(pids, timeout_s=2)


def test_a_killed_launcher_takes_ranks_and_their_helpers_along(accel, sleepers, gone):
    with launched(accel) as process:
        pids = accel.pids(4)
        process.kill()
        process.communicate(timeout=20)  # also: nobody keeps its output open
    gone(pids, timeout_s=2)


def test_ranks_die_with_a_launcher_whose_guard_was_killed_too(accel, sleepers, gone):
    with launched(accel) as process:
        pids = accel.pids(4)
        ranks = [pid for pid, path in zip(pids, sorted(accel.folder.glob("*.pid")), strict=True) if "rank" in path.name]
        (guard,) = set(children(process.pid)) - set(ranks)
        os.kill(guard, signal.SIGKILL)
        process.kill()
        process.wait(20)
        gone(ranks, timeout_s=2)
        for pid in set(pids) - set(ranks):
            os.kill(pid, signal.SIGKILL)


def test_a_run_survives_the_loss_of_its_guard(accel):
    accel.script("""
        import os, pathlib, time
        pathlib.Path(f"rank.{os.getpid()}.pid").touch()
        while not pathlib.Path("go").exists():
            time.sleep(0.01)
    """)
    with launched(accel) as process:
        pids = accel.pids(2)
        (guard,) = set(children(process.pid)) - set(pids)
        os.kill(guard, signal.SIGKILL)
        (accel.folder / "go").touch()
        assert process.wait(20) == 0


def test_what_a_good_run_leaves_running_may_stay(accel, gone):
    accel.script("""
        import pathlib, subprocess, sys
        uploader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], stdout=subprocess.DEVNULL,
                                    stderr=subprocess.DEVNULL)
        pathlib.Path(f"x.{uploader.pid}.pid").touch()
        uploader.returncode = 0  # leave it
    """)
    with launched(accel) as process:
        assert process.wait(20) == 0
        process.communicate()
    pids = accel.pids(2)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)  # raises where it is gone
    gone(pids)
