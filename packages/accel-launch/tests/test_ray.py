"""Ray as the engine: what it is asked for, who is where, and a rank's process; the cluster tier has Ray itself."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from accel_launch import Target, make_plan, resolve_config, run_plan
from accel_launch.ray.host import Host
from accel_launch.ray.places import Place, by_machine, rank_variables
from accel_launch.ray.plan import request
from accel_state.errors import LaunchError
from accel_state.topology import Topology


def resolved(**flags):
    flags = {"launcher": "ray", "num_processes": 4, **flags}
    return resolve_config(Target("train", is_module=True), flags, environ={}, count=lambda kind, variables: 0)


def test_ranks_are_packed_unless_machines_are_asked_for():
    packed = request(resolved())
    assert (packed["num_bundles"], packed["ranks_per_bundle"], packed["strategy"]) == (4, 1, "PACK")
    assert (packed["cpus_per_rank"], packed["gpus_per_rank"], packed["needs_gpus"]) == (1, 1, False)
    spread = request(resolved(num_machines=2, cpu=True, num_cpu_threads_per_process=3, main_process_port=7))
    assert (spread["num_bundles"], spread["ranks_per_bundle"], spread["strategy"]) == (2, 2, "STRICT_SPREAD")
    assert (spread["cpus_per_rank"], spread["gpus_per_rank"], spread["port"]) == (3, 0, 7)


def test_the_plan_can_be_read_before_ray_knows_of_it():
    plan = make_plan(resolved(num_machines=2, num_cpu_threads_per_process=3), environ={"LOCAL_RANK": "7"})
    assert plan.as_text().startswith(
        "4 processes, started by Ray: each with 3 CPU and, where Ray has any, 1 GPU, 2 on each of 2 machines\n"
    )
    assert plan.ranks[3].environment["RANK"] == "3" and "LOCAL_RANK" not in plan.ranks[3].environment
    assert plan.removed == ("LOCAL_RANK",)
    alone = make_plan(resolved(num_processes=1), environ={})
    assert "RANK" not in alone.ranks[0].environment


def test_ray_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r"pip install 'accel-launch\[ray\]'"):
        run_plan(make_plan(resolved(), environ={}))


PLACES = [Place("b", "10.0.0.2", ("1",)), Place("a", "10.0.0.1", ("0",)), Place("b", "10.0.0.2", ("3",))]


def test_ranks_are_numbered_machine_after_machine():
    assert by_machine(PLACES) == [0, 2, 1]
    places = [PLACES[index] for index in by_machine(PLACES)]
    found = rank_variables(places, 29500)
    assert [Topology.from_env(one) for one in found] == [
        Topology(0, 3, 0, 2, 0, 2, "10.0.0.2", 29500),
        Topology(1, 3, 1, 2, 0, 2, "10.0.0.2", 29500),
        Topology(2, 3, 0, 1, 1, 2, "10.0.0.2", 29500),
    ]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["1,3", "1,3", "0"]


def test_one_rank_is_as_if_started_by_hand():
    assert rank_variables([Place("a", "10.0.0.1", ())], 29500) == [{}]


def started(code: str, folder, **environment: str) -> Host:
    host = Host()
    command = (sys.executable, "-u", "-c", textwrap.dedent(code))
    assert host.start(command, environment, str(folder)) is None
    return host


def read(host: Host) -> tuple[bytes, bytes, int]:
    out, err, code = b"", b"", None
    while code is None:
        more_out, more_err, code = host.read()
        out, err = out + more_out, err + more_err
    return out, err, code


def test_what_a_rank_writes_and_how_it_ends(tmp_path):
    code = """
        import os, sys
        print(os.environ["RANK"], os.getcwd())
        print("why", file=sys.stderr)
        sys.exit(7)
    """
    assert read(started(code, tmp_path, RANK="5")) == (f"5 {tmp_path}\n".encode(), b"why\n", 7)


def test_a_helper_that_stays_does_not_hold_the_end(tmp_path):
    code = """
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid)
    """
    out, _, code = read(started(code, tmp_path))
    assert code == 0
    os.kill(int(out), signal.SIGKILL)


def test_a_thread_that_does_not_hear_ctrl_c_starts_ranks_that_do(tmp_path):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        host = started("import os, time; os.write(1, b'here\\n'); time.sleep(300)", tmp_path)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert host.read()[0] == b"here\n"
    host.signal(signal.SIGINT)
    _, err, code = read(host)
    assert code == -signal.SIGINT and b"KeyboardInterrupt" in err


def test_a_program_or_a_folder_that_is_not_there_is_named(tmp_path):
    assert "'absent' cannot be used on" in Host().start(("absent",), {}, str(tmp_path))
    assert f"'{tmp_path}/no' cannot be used on" in Host().start(("true",), {}, f"{tmp_path}/no")


@pytest.mark.parametrize("how", ["kill", "death"])
def test_a_rank_and_its_helpers_end_with_the_actor(tmp_path, gone, how):
    rank = """
        import os, subprocess, sys, time
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        os.write(1, f"{os.getpid()} {helper.pid}\\n".encode())  # at once
        time.sleep(300)
    """
    actor = f"""
        import sys
        from accel_launch.ray.host import Host
        host = Host()
        host.start((sys.executable, "-u", "-c", {textwrap.dedent(rank)!r}), {{}}, ".")
        print(host.read()[0].decode(), flush=True)
        sys.stdin.readline()
        host.kill()
        host.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(actor)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        if how == "death":
            process.kill()
        else:
            process.stdin.write("now\n")
            process.stdin.flush()
        gone(pids)
