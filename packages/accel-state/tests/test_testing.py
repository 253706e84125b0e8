"""`run_ranks` and the pool: values, failures, time-outs, and that nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_state.errors import RankFailedError
from accel_state.testing import RankPool, run_ranks

Ranks = Callable[..., list[Any]]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()  # a zombie has ended


def ended(pids: list[int], within_s: float = 10) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def test_values_by_rank_arguments_and_closures(ranks: Ranks) -> None:
    offset = 10

    def body(a: int, b: int = 0) -> int:
        return int(os.environ["RANK"]) + a + b + offset

    assert ranks(body, 3, 100, b=1000) == [1110, 1111, 1112]


def test_the_environment_is_a_launchers_and_the_callers_own_stays_out(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_MIXED_PRECISION", "bf16")

    def body() -> dict[str, str]:
        return dict(os.environ)

    first, second = ranks(body, 2, env={"ADDED": "x"})
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"], first["WORLD_SIZE"]) == ("0", "1", "1", "2")
    assert first["MASTER_PORT"] == second["MASTER_PORT"] and first["ADDED"] == "x"
    assert "ACCEL_MIXED_PRECISION" not in first
    (again,) = ranks(body, 1)
    assert "ADDED" not in again


def test_ranks_are_fresh_and_do_not_share_pythons_random_state(ranks: Ranks) -> None:
    def body() -> Any:
        import random

        import torch

        assert "leaked" not in sys.modules
        sys.modules["leaked"] = sys
        return random.random(), torch.rand(1).item()

    first, second = ranks(body, 2)
    assert first[0] != second[0] and first[1] == second[1]
    assert ranks(body, 1)[0][1] == first[1]


def test_a_traceback_and_the_output_are_in_the_error(ranks: Ranks) -> None:
    def deep() -> None:
        raise ValueError("the reason")

    def body() -> None:
        print("printed by", os.environ["RANK"])
        os.write(2, b"written to stderr\n")
        if os.environ["RANK"] == "1":
            deep()

    with pytest.raises(RankFailedError) as caught:
        ranks(body, 2)
    said = str(caught.value)
    assert "rank 1 of 2 failed (exit code 1)" in said and "ValueError: the reason" in said
    assert "test_testing.py" in said and "in deep" in said
    assert "---- stdout of rank 1\nprinted by 1" in said and "written to stderr" in said


def test_the_pool_survives_failures(ranks: Ranks) -> None:
    def fail() -> None:
        raise KeyError("x")

    (parent,) = ranks(os.getppid, 1)
    with pytest.raises(RankFailedError, match="KeyError"):
        ranks(fail, 2)
    assert ranks(os.getppid, 1) == [parent]


@pytest.mark.parametrize(("code", "said"), [(0, "without returning"), (3, "exit code 3"), (-9, "killed by SIGKILL")])
def test_ends_without_a_result(ranks: Ranks, code: int, said: str) -> None:
    def body() -> None:
        if code == -9:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(code)

    with pytest.raises(RankFailedError, match=said):
        ranks(body, 1)


def test_a_result_that_cannot_be_sent_is_a_failure(ranks: Ranks) -> None:
    def body() -> Any:
        import threading

        return threading.Lock()

    with pytest.raises(RankFailedError, match="cannot pickle"):
        ranks(body, 1)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """One that tests may spoil."""
    pool = RankPool()
    yield pool
    pool.close()


def test_a_time_out_names_the_hanging_ranks_with_their_stacks_and_leaves_nobody(pool: RankPool, tmp_path: Path) -> None:
    def body() -> None:
        rank = os.environ["RANK"]
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (tmp_path / f"pids-{rank}").write_text(f"{os.getpid()} {os.getppid()} {grandchild.pid}")
        if rank == "1":
            dawdle()

    def dawdle() -> None:
        time.sleep(60)

    with pytest.raises(RankFailedError) as caught:
        pool.run(body, 2, timeout_s=3)
    said = str(caught.value)
    assert "not done within 3 s: rank 1 of 2 still ran" in said
    assert "in dawdle" in said and "stderr of rank 1" in said
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 6 and ended(pids)


def test_ranks_that_hang_after_a_failure_are_ended_and_the_failure_is_shown(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_state.testing.pool._GRACE_S", 0.5)

    def body() -> None:
        if os.environ["RANK"] == "0":
            raise ValueError("the reason")
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankFailedError, match=r"(?s)rank 1 of 2 still ran 0.5 s after.*ValueError: the reason"):
        pool.run(body, 2)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("victim", ["the test process", "the forking process"])
def test_nobody_is_left_when_one_is_killed(tmp_path: Path, victim: str) -> None:
    program = f"""
        import os, pathlib, time
        from accel_state.testing import run_ranks

        def body():
            path = pathlib.Path({str(tmp_path)!r}, os.environ["RANK"])
            path.with_suffix(".part").write_text(f"{{os.getpid()}} {{os.getppid()}}")
            path.with_suffix(".part").rename(path)
            time.sleep(60)

        if __name__ == "__main__":
            run_ranks(body, 2)
    """
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    process = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not all((tmp_path / rank).exists() for rank in "01") and time.monotonic() < deadline:
            time.sleep(0.05)
        pids = [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]
        if victim == "the test process":
            process.kill()
        else:
            os.kill(pids[1], signal.SIGKILL)
        _, said = process.communicate(timeout=30)
        assert ended(pids)
        assert victim == "the test process" or "the process that forks the ranks has ended" in said
    finally:
        process.kill()


def test_run_ranks_needs_no_pytest() -> None:
    code = """
        import sys
        sys.modules["pytest"] = None
        from accel_state.testing import run_ranks
        assert run_ranks(lambda x: x + 1, 2, 1) == [2, 2]
        assert "torch" not in sys.modules
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_nonsense_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="n=0"):
        run_ranks(lambda: None, 0)
