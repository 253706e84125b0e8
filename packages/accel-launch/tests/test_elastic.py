"""Torch elastic as the engine: restarts, exit codes, streams, and nobody left behind."""

import os
import signal
from pathlib import Path

import pytest

from accel_launch import Target, resolve_config
from accel_launch.elastic.plan import request
from accel_state.errors import LaunchError


def asked(flags, environ=None):
    count = lambda kind, variables: 0  # noqa: E731
    flags = {"cpu": True, "num_processes": 2, **flags}
    return request(resolve_config(Target("train", is_module=True), flags, environ=environ or {}, count=count))


def test_one_machine_with_restarts_meets_on_its_loopback():
    found = asked({"max_restarts": 3})
    assert (found["min_nodes"], found["max_nodes"], found["nproc_per_node"]) == (1, 1, 2)
    assert (found["rdzv_backend"], found["rdzv_endpoint"], found["local_addr"]) == ("c10d", "127.0.0.1:0", "127.0.0.1")
    assert found["max_restarts"] == 3 and found["rdzv_configs"] == {"is_host": True}


def test_several_machines():
    several = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "head", "main_process_port": 1234}
    found = asked(several)
    assert (found["rdzv_backend"], found["rdzv_endpoint"], found["nproc_per_node"]) == ("static", "head:1234", 1)
    assert found["rdzv_configs"] == {"rank": 1, "timeout": 900} and found["local_addr"] is None
    found = asked({**several, "min_machines": 1, "rdzv_conf": "last_call_timeout=2", "rdzv_id": "job"})
    assert (found["min_nodes"], found["max_nodes"], found["rdzv_backend"]) == (1, 2, "c10d")
    assert found["rdzv_configs"] == {"is_host": False, "last_call_timeout": "2"} and found["run_id"] == "job"


def test_rendezvous_options_are_pairs():
    with pytest.raises(LaunchError, match="--rdzv-conf a: 'a' is not allowed; give key=value"):
        asked({"max_restarts": 1, "rdzv_conf": "a"})


def test_a_failed_rank_is_started_again_with_all_others(accel):
    accel.script("""
        import os, sys
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "attempt", attempt, sys.argv[1])
        if attempt == 0 and os.environ["RANK"] == "1":
            raise RuntimeError("only once")
        assert os.environ["ACCEL_USE_CPU"] == "true"
    """)
    done = accel("launch", "--cpu", "--num-processes", "2", "--max-restarts", "1", "--log-prefix", "train.py", "a$$b")
    assert done.returncode == 0, done.stderr
    lines = set(done.stdout.splitlines())
    assert {"[0] rank 0 of 2 attempt 1 a$$b", "[1] rank 1 of 2 attempt 1 a$$b"} <= lines
    assert "[1] rank 1 of 2 attempt 0 a$$b" in lines and "[1] RuntimeError: only once" in done.stderr


def test_the_first_failure_is_named_last_and_its_code_kept(accel):
    accel.script("""
        import os, sys, time
        if os.environ["RANK"] == "1":
            print("the real cause", file=sys.stderr)
            sys.exit(7)
        time.sleep(60)
    """)
    done = accel("launch", "--cpu", "--num-processes", "2", "--launcher", "elastic", "train.py")
    assert done.returncode == 7
    assert done.stderr.endswith("accel launch: rank 1 of 2 failed first: exit code 7\nthe real cause\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("whom", ["launcher", "agent"])
def test_a_kill_takes_the_ranks_along(accel, sleepers, gone, whom):
    process = accel.start("launch", "--cpu", "--num-processes", "2", "--launcher", "elastic", sleepers)
    pids = accel.pids(4)
    rank = next(int(path.suffixes[0][1:]) for path in accel.folder.glob("rank*.pid"))
    agent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(process.pid if whom == "launcher" else agent, signal.SIGKILL)
    process.communicate(timeout=60)
    gone([*pids, agent])


def test_sigterm_reaches_the_ranks_and_is_waited_for(accel):
    accel.script("""
        import os, pathlib, signal, sys, time
        def leave(signum, frame):
            time.sleep(0.3)
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        pathlib.Path(f"rank.{os.getpid()}.pid").touch()
        time.sleep(60)
    """)
    process = accel.start("launch", "--cpu", "--num-processes", "2", "--launcher", "elastic", "train.py")
    accel.pids(2)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert out.count("saved") == 2, err
    assert process.returncode == 0
