"""Processes that come to life, end well, fail, and what is seen of it."""

import os
import pty
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_launch import launch
from accel_state.errors import LaunchError, SettingError


def test_ranks_get_their_place_settings_and_arguments(accel):
    accel.script("""
        import os, sys
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS",
                 "ACCEL_USE_CPU", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION")
        print(*(os.environ[name] for name in names), int(os.environ["MASTER_PORT"]) > 1023, *sys.argv[1:])
    """)
    done = accel(
        "launch", "--cpu", "--num_processes", "2", "--mixed_precision", "bf16", "train.py", "--cpu", "-x", "--help"
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} {rank} 2 2 0 127.0.0.1 1 true true bf16 True --cpu -x --help" for rank in range(2)
    ]


def test_modules_and_programs(accel):
    accel.script("import sys; print(__name__, *sys.argv[1:])", "some_module.py")
    assert accel("launch", "--cpu", "-m", "some_module", "-v").stdout == "__main__ -v\n"
    assert accel("launch", "--cpu", "--num_processes", "2", "--no_python", "echo", "hi").stdout == "hi\nhi\n"


def test_one_process_keeps_the_streams(accel):
    accel.script("import sys; print(sys.stdin.read(), end=''); print('err', file=sys.stderr)")
    with accel.start("launch", "--cpu", "train.py", stdin=subprocess.PIPE) as process:
        assert process.communicate("hello\n", timeout=60) == ("hello\n", "err\n")


def test_output_is_live(accel):
    accel.script("""
        import pathlib, sys, time
        print("out")
        sys.stderr.write("\\r 10%")
        sys.stderr.flush()
        while not pathlib.Path("seen").exists():
            time.sleep(0.01)
    """)
    with accel.start("launch", "--cpu", "--num_processes", "2", "train.py") as process:
        assert [process.stdout.readline() for _ in range(2)] == ["out\n"] * 2
        assert process.stderr.read(10) == "\n 10%\n 10%"  # text mode turns \r into \n
        (accel.folder / "seen").touch()
    assert process.returncode == 0


def test_a_terminal_stays_a_terminal_of_the_same_size(accel):
    accel.script("""
        import os, sys
        if os.environ["RANK"] == "0":
            print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size(2).columns, file=sys.stderr)
    """)
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "cols", "73"], stdin=theirs, check=True)
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with accel.start("launch", "--cpu", "--num_processes", "2", "train.py", **streams) as process:
        assert process.wait(60) == 0
    os.close(theirs)
    assert os.read(ours, 1000) == b"True True 73\r\n"
    os.close(ours)


def test_where_nobody_reads_stderr_the_ranks_go_on(accel):
    accel.script("import sys; print('x' * 100_000, file=sys.stderr); print('done')")
    reader, writer = os.pipe()
    os.close(reader)
    with accel.start("launch", "--cpu", "--num_processes", "2", "train.py", stderr=writer) as process:
        os.close(writer)
        assert process.communicate(timeout=60)[0] == "done\n" * 2


def test_lines_of_several_ranks_do_not_mix(accel):
    accel.script("""
        import os
        for line in range(2000):
            print(os.environ["RANK"] * 50, line)
    """)
    done = accel("launch", "--cpu", "--num_processes", "4", "train.py")
    expected = [f"{str(rank) * 50} {line}" for rank in range(4) for line in range(2000)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


def test_a_reader_that_pauses_delays_neither_signals_nor_failures(accel, gone):
    accel.script("""
        import os, pathlib, time
        pathlib.Path(f"rank.{os.getpid()}.pid").touch()
        while True:
            print("x" * 10_000)
    """)
    with accel.start("launch", "--cpu", "--num_processes", "2", "train.py") as process:
        pids = accel.pids(2)
        time.sleep(0.5)  # every buffer on the way is full now
        process.terminate()
        gone(pids, timeout_s=5)
        process.kill()
        process.communicate()


def failing(accel, how):
    return accel.script(f"""
        import os, sys, time
        if os.environ["RANK"] == "1":
            {how}
        time.sleep(300)
    """)


@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ("raise ValueError('boom')", 1, "rank 1 of 2 failed first: exit code 1; the others were ended"),
        ("sys.exit(3)", 3, "rank 1 of 2 failed first: exit code 3; the others were ended"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 of 2 failed first: killed by SIGKILL"),
        ("os.abort()", 134, "rank 1 of 2 failed first: killed by SIGABRT"),
    ],
)
def test_the_first_failure_ends_the_others_and_gives_the_exit_code(accel, how, code, line):
    failing(accel, how)
    start_s = time.monotonic()
    done = accel("launch", "--cpu", "--num_processes", "2", "train.py")
    assert time.monotonic() - start_s < 10  # the others sleep far longer
    assert done.returncode == code
    assert line in done.stderr


def test_the_traceback_of_the_first_failure_comes_last(accel):
    accel.script("""
        import os, signal, sys, time
        def noise(*_):
            print("noise of the end", file=sys.stderr)
            sys.exit(5)
        signal.signal(signal.SIGTERM, noise)
        if os.environ["RANK"] == "1":
            time.sleep(0.3)
            raise ValueError("the cause")
        time.sleep(300)
    """)
    done = accel("launch", "--cpu", "--num_processes", "2", "train.py")
    assert done.returncode == 1
    assert "noise of the end" in done.stderr
    lines = done.stderr.splitlines()
    assert lines[-1] == "ValueError: the cause"
    last = done.stderr.rindex("accel launch: rank 1 of 2 failed first")
    assert done.stderr.index("noise of the end") < last < done.stderr.rindex("Traceback")


def test_who_raised_first_is_blamed_though_it_ends_last(accel):
    accel.script("""
        import atexit, os, pathlib, sys, time
        if os.environ["RANK"] == "1":
            atexit.register(time.sleep, 0.5)  # a slow teardown, as of a process group
            atexit.register(pathlib.Path("broken").touch)
            raise ValueError("the cause")
        while not pathlib.Path("broken").exists():
            time.sleep(0.01)
        raise ConnectionError("connection closed by peer")
    """)
    done = accel("launch", "--cpu", "--num_processes", "2", "train.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: the cause"


def test_who_does_not_end_when_told_is_killed_after_the_grace_time(accel, gone):
    accel.script("""
        import os, pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(f"rank{os.environ['RANK']}.{os.getpid()}.pid").touch()
        if os.environ["RANK"] == "1":
            while len(list(pathlib.Path().glob("*.pid"))) < 2:
                time.sleep(0.01)
            sys.exit(3)
        time.sleep(300)
    """)
    start_s = time.monotonic()
    done = accel("launch", "--cpu", "--num_processes", "2", "--grace_s", "1", "train.py")
    assert 1.0 <= time.monotonic() - start_s < 10
    assert done.returncode == 3
    gone(accel.pids(2), timeout_s=1)


def test_helpers_of_a_failed_rank_die_with_it(accel, gone):
    accel.script("""
        import os, pathlib, subprocess, sys
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        pathlib.Path(f"helper.{helper.pid}.pid").touch()
        os.abort()
    """)
    assert accel("launch", "--cpu", "train.py").returncode == 134
    gone(accel.pids(1), timeout_s=2)


def test_a_single_process_fails_as_it_would_by_hand(accel):
    accel.script("raise ValueError('boom')")
    done = accel("launch", "--cpu", "train.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: boom"
    assert done.stderr.count("Traceback") == 1


def test_a_killed_single_process_is_explained(accel):
    accel.script("import os; os.kill(os.getpid(), 9)")
    done = accel("launch", "--cpu", "train.py")
    assert done.returncode == 137
    assert "the process ended: killed by SIGKILL; where nobody did that by hand" in done.stderr


def test_a_program_that_does_not_exist(accel):
    done = accel("launch", "--cpu", "--num_processes", "2", "--no_python", "no-such-program")
    assert done.returncode == 2
    assert done.stderr == "accel launch: error: 'no-such-program' cannot be started: No such file or directory\n"


def test_a_port_in_use_is_refused_before_anything_starts(accel):
    accel.script("print('started')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = accel("launch", "--cpu", "--num_processes", "2", "--main_process_port", port, "train.py")
    assert done.returncode == 2
    assert f"--main-process-port {port} is in use on this machine" in done.stderr
    assert done.stdout == ""


def test_two_launches_at_once_get_ports_of_their_own(accel):
    accel.script("""
        import os, pathlib, time
        pathlib.Path(f"{os.environ['MASTER_PORT']}.port").touch()
        while len(list(pathlib.Path().glob("*.port"))) < 2:
            time.sleep(0.01)
    """)
    launches = [accel.start("launch", "--cpu", "--num_processes", "2", "train.py") for _ in range(2)]
    for process in launches:
        with process:
            assert process.wait(60) == 0


def test_real_ranks_meet_at_the_port(accel):
    accel.script("""
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        print(total.item())
        dist.destroy_process_group()
    """)
    done = accel("launch", "--cpu", "--num_processes", "2", "train.py")
    assert (done.returncode, done.stdout) == (0, "3.0\n3.0\n"), done.stderr


def test_launch_from_python(accel, capfd, monkeypatch):
    monkeypatch.chdir(accel.folder)
    accel.script("import os, sys; print(os.environ['RANK'], *sys.argv[1:]); sys.exit(int(sys.argv[1]))")
    launch("train.py", "0", num_processes=2, cpu=True)
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 0", "1 0"]
    with pytest.raises(LaunchError, match=r"train\.py failed with exit code 4"):
        launch("train.py", "4", num_processes=2, cpu=True)
    accel.script("raise ValueError('a bad batch')", "bad.py")
    for flags in ({"num_processes": 1}, {"num_processes": 2}, {"num_processes": 2, "launcher": "elastic"}):
        with pytest.raises(LaunchError, match=r"bad\.py failed with exit code 1:(?s:.*)Traceback(?s:.*)a bad batch$"):
            launch("bad.py", cpu=True, **flags)
    with pytest.raises(SettingError, match="'num_procs'; did you mean 'num_processes'"):
        launch("train.py", num_procs=2)


def test_launch_leaves_no_files_or_handlers_behind(accel, monkeypatch):
    import signal

    monkeypatch.chdir(accel.folder)
    accel.script("")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before, others = {path.name for path in Path("/proc/self/fd").iterdir()}, children.read_text()
    launch("train.py", num_processes=2, cpu=True)
    assert {path.name for path in Path("/proc/self/fd").iterdir()} == before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == handlers
    assert children.read_text() == others


def test_ranks_do_not_inherit_the_launchers_files(accel):
    accel.script("import os; print(sorted(os.listdir('/proc/self/fd')), flush=True)")
    done = accel("launch", "--cpu", "--num_processes", "2", "train.py")
    assert done.stdout.splitlines() == ["['0', '1', '2', '3']"] * 2  # 3 lists the folder itself


def test_the_interpreter_is_the_launchers(accel):
    accel.script("import sys; print(sys.executable)")
    assert accel("launch", "--cpu", "train.py").stdout.strip() == sys.executable
