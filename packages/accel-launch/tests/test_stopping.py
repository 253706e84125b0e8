"""Ranks that were asked to stop, saved and left with 75: handed on, and not taken for a failure."""

import signal

import pytest

from accel_launch.slurm import Batch, batch_script

ENGINES = pytest.mark.parametrize(
    "engine", [["--launcher", "spawn"], ["--max-restarts", "3"]], ids=["spawn", "elastic"]
)


@pytest.fixture
def saver(accel):
    """A script that takes its time to save when it gets SIGTERM or SIGUSR1."""
    return accel.script("""
        import os, pathlib, signal, sys, time
        asked = []
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, lambda signum, _: asked.append(signum))
        pathlib.Path(f"rank{os.environ['RANK']}.{os.getpid()}.pid").touch()
        while not asked:
            time.sleep(0.01)
        time.sleep(0.5 * int(os.environ["RANK"]))
        print("saved after", len(asked), flush=True)
        sys.exit(75)
    """)


@ENGINES
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1], ids=str)
def test_a_signal_lets_all_ranks_save_and_its_code_is_handed_on(accel, saver, engine, signum):
    process = accel.start("launch", "--cpu", "--num-processes", "2", *engine, saver)
    accel.pids(2)
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert out.count("saved after") == 2
    assert f"accel launch: ended by {signum.name}" in err and "failed first" not in err


@ENGINES
def test_ranks_that_stop_by_themselves_are_not_started_again(accel, engine):
    accel.script("""
        import os, pathlib, sys, time
        pathlib.Path(f"rank{os.environ['RANK']}.{os.getpid()}.pid").touch()
        while len(list(pathlib.Path().glob("*.pid"))) < 2:
            time.sleep(0.01)
        print("saved", flush=True)
        time.sleep(0.5 * int(os.environ["RANK"]))
        sys.exit(75)
    """)
    done = accel("launch", "--cpu", "--num-processes", "2", *engine, "train.py")
    assert done.returncode == 75, done.stderr
    assert done.stdout.count("saved") == 2
    assert done.stderr.endswith("accel launch: stopped, to be resumed: exit code 75\n")


def test_a_signal_ends_restarts(accel, sleepers):
    process = accel.start("launch", "--cpu", "--num-processes", "2", "--max-restarts", "3", sleepers)
    accel.pids(4)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert len(accel.pids(4)) == 4


def test_a_rank_that_does_not_leave_is_killed_after_the_grace_time(accel, gone):
    accel.script("""
        import os, pathlib, signal, time
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        pathlib.Path(f"rank.{os.getpid()}.pid").touch()
        time.sleep(300)
    """)
    process = accel.start("launch", "--cpu", "--num-processes", "2", "--grace-s", "1", "train.py")
    pids = accel.pids(2)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=60)
    assert process.returncode == 137
    gone(pids)


def test_a_batch_script_that_queues_itself_again(accel):
    flags = ["--machines", "2", "--processes", "2", "--time", "2:00:00", "--stop-before", "120", "--requeue"]
    done = accel("slurm", *flags, "--", "train.py")
    wished = Batch(machines=2, processes=2, time="2:00:00", stop_before_s=120, requeue=True)
    assert done.stdout == batch_script(wished, ["train.py"])
    lines = done.stdout.splitlines()
    assert {"#SBATCH --signal=USR1@120", "#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(lines)
    assert lines[-4].startswith("srun --kill-on-bad-exit=0 ") and " --grace-s 120 " in lines[-4]
    assert lines[-3:] == ["code=$?", '[ $code -ne 75 ] || scontrol requeue "$SLURM_JOB_ID"', "exit $code"]


def test_a_moment_before_no_known_end_is_refused(accel):
    done = accel("slurm", "--stop-before", "120", "--", "train.py")
    assert done.returncode == 2 and "--stop-before 120 counts back from the end: give --time" in done.stderr
