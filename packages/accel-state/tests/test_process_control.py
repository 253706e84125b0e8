"""Order among ranks, printing, and the end of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state import DeviceKind, InitProcessGroupKwargs, PartialState, gather, wait_for_everyone
from accel_state.errors import DeviceError, ProcessGroupError, SettingError
from accel_state.testing.pool import _reserved_port

Ranks = Callable[..., list[Any]]


def test_the_main_process_goes_first_also_nested(ranks: Ranks, tmp_path: Path) -> None:
    def body() -> Any:
        state = PartialState(cpu=True)
        for name in ("one", "two"):
            with state.main_process_first(), state.main_process_first(), state.local_main_process_first():
                seen = (tmp_path / name).exists()
                if state.is_main_process:
                    time.sleep(0.2)
                    (tmp_path / name).touch()
            assert seen is not state.is_main_process
        return True

    assert ranks(body, 3) == [True] * 3


def test_a_failure_of_the_first_reaches_those_who_wait(ranks: Ranks) -> None:
    def body() -> Any:
        state = PartialState(cpu=True)
        try:
            with state.main_process_first():
                raise KeyError("no such file")
        except (KeyError, ProcessGroupError) as error:
            return f"{type(error).__name__}: {error}"

    main, other = ranks(body, 2)
    assert main.startswith("KeyError")
    assert "rank 1 waits in main_process_first" in other
    assert "for rank 0, which went first at" in other and "KeyError: 'no such file'" in other


def test_print_once_per_machine(ranks: Ranks) -> None:
    def body() -> Any:
        import contextlib
        import io

        out = io.StringIO()
        os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = "2", str(int(os.environ["RANK"]) % 2)
        with contextlib.redirect_stdout(out):
            PartialState(cpu=True).print("hello")
        return out.getvalue()

    assert ranks(body, 4) == ["hello\n", "", "hello\n", ""]


def test_split_between_processes(ranks: Ranks) -> None:
    def body() -> Any:
        with PartialState(cpu=True).split_between_processes(list("abc"), apply_padding=True) as part:
            return part

    assert ranks(body, 2) == [["a", "b"], ["c", "c"]]


def test_kwargs_of_the_process_group(ranks: Ranks) -> None:
    from datetime import timedelta

    assert InitProcessGroupKwargs().to_kwargs() == {}
    assert InitProcessGroupKwargs("gloo").to_kwargs() == {"backend": "gloo", "timeout": timedelta(minutes=30)}
    kwargs = InitProcessGroupKwargs(timeout=timedelta(seconds=77)).to_kwargs()

    def body() -> Any:
        import warnings

        from accel_state.process_group import current_job

        PartialState(cpu=True, **kwargs)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            PartialState(timeout=timedelta(seconds=5))
        return current_job().timeout, [str(one.message) for one in caught]

    for timeout, warned in ranks(body, 2):
        assert timeout == timedelta(seconds=77)
        assert len(warned) == 1 and "no effect: timeout=0:00:05 (it is 0:01:17)" in warned[0]


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [({"timeout": 0}, "a time-out of 0:00:00"), ({"backend": "nccl"}, "backend='nccl' cannot carry")],
)
def test_settings_that_cannot_work_are_refused(ranks: Ranks, kwargs: dict[str, Any], said: str) -> None:
    def body() -> Any:
        from datetime import timedelta

        given = {key: timedelta(seconds=value) if key == "timeout" else value for key, value in kwargs.items()}
        try:
            PartialState(cpu=True, **given)
        except ProcessGroupError as error:
            return str(error)

    assert all(said in text for text in ranks(body, 2))


def test_a_master_that_is_not_there(ranks: Ranks) -> None:
    def body() -> Any:
        from datetime import timedelta

        os.environ.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        try:
            PartialState(cpu=True, timeout=timedelta(seconds=1))
        except ProcessGroupError as error:
            return str(error)

    (said,) = ranks(body, 1)
    assert "rank 1 of 2 could not join the others at 127.0.0.1:" in said


def test_cpu_cannot_be_asked_for_once_another_device_is_in_use(
    fresh_state: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceKind, "is_available", lambda _kind: True)
    monkeypatch.setenv("ACCEL_TORCH_DEVICE", "mps")
    assert PartialState().device.type == "mps"
    with pytest.raises(SettingError, match="already runs on mps"):
        PartialState(cpu=True)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda:9", r"there are 2 cuda devices \(0 to 1\)"),
        ("meta", "device type 'meta'"),
        ("cuda:one", "'cuda:one' was asked for, which is not a device: write it as cuda:0"),
    ],
)
def test_a_device_that_does_not_exist(
    fresh_state: None, monkeypatch: pytest.MonkeyPatch, device: str, said: str
) -> None:
    monkeypatch.setattr(DeviceKind, "is_available", lambda _kind: True)
    monkeypatch.setattr(DeviceKind, "device_count", lambda _kind: 2)
    monkeypatch.setenv("ACCEL_TORCH_DEVICE", device)
    with pytest.raises(DeviceError, match=said):
        PartialState()


def test_a_kind_of_device_that_is_not_here(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TORCH_DEVICE", "mlu:0")
    with pytest.raises(DeviceError, match="'mlu:0' was asked for, but no mlu device can be used here"):
        PartialState()


def test_collectives_work_again_after_the_group_was_destroyed(ranks: Ranks) -> None:
    def body() -> Any:
        state = PartialState(cpu=True)
        wait_for_everyone()
        state.destroy_process_group()
        try:
            state.process_index  # noqa: B018
        except AttributeError as error:
            said = str(error)
        return said, gather(torch.tensor([PartialState(cpu=True).process_index])).tolist()

    for said, gathered in ranks(body, 2):
        assert "no attribute `process_index`: the state was reset" in said
        assert gathered == [0, 1]


# ---------------------------------------------------------------- how programs end


def run_program(code: str, num_ranks: int, timeout_s: float = 60) -> list[tuple[int, str]]:
    """A script on several ranks as a launcher would start it; exit codes and stderrs."""
    with _reserved_port() as port:
        processes = [
            subprocess.Popen(
                [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(num_ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                },
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            return [(process.wait(timeout_s), process.communicate(timeout=timeout_s)[1]) for process in processes]
        finally:
            for process in processes:
                process.kill()


def test_a_program_ends_quietly_also_where_the_first_rank_is_done_early() -> None:
    ended = run_program(
        """
        import time
        from accel_state import PartialState
        state = PartialState(cpu=True)
        with state.main_process_first():
            time.sleep(0 if state.is_main_process else 1)
        state.wait_for_everyone() if state.process_index > 5 else None
        with state.main_process_first():
            pass
        """,
        2,
    )
    assert ended == [(0, ""), (0, "")]


def test_exit_codes_survive_and_nobody_is_kept_waiting() -> None:
    start = time.monotonic()
    ended = run_program(
        """
        import sys
        from accel_state import PartialState
        state = PartialState(cpu=True)
        state.wait_for_everyone()
        if state.is_main_process:
            sys.exit(3)
        state.wait_for_everyone()
        """,
        2,
    )
    assert ended[0][0] == 3 and ended[1][0] == 1
    assert "rank 0 never came" in ended[1][1]
    assert time.monotonic() - start < 45


def test_wait_for_everyone_makes_the_state(ranks: Ranks) -> None:
    def body() -> Any:
        os.environ["ACCEL_USE_CPU"] = "1"
        wait_for_everyone()
        return PartialState().num_processes

    assert ranks(body, 2) == [2, 2]


def test_each_machine_has_its_own_first_also_when_ranks_are_dealt_round_robin(ranks: Ranks, tmp_path: Path) -> None:
    def body() -> Any:
        rank = int(os.environ["RANK"])
        place = {"LOCAL_RANK": rank // 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": rank % 2, "GROUP_WORLD_SIZE": 2}
        os.environ.update({name: str(value) for name, value in place.items()})
        state = PartialState(cpu=True)
        mine = tmp_path / f"node-{rank % 2}"
        with state.local_main_process_first():
            seen = mine.exists()
            if state.is_local_main_process:
                time.sleep(0.2 * (1 + rank))
                mine.touch()
        return state.is_local_main_process, seen

    assert ranks(body, 4) == [(True, False), (True, False), (False, True), (False, True)]


def test_a_rank_that_leaves_at_once_lets_slower_ones_connect(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> Any:
        from accel_state import process_group

        connect = process_group.Channel.note_connected
        if os.environ["RANK"] == "1":
            monkeypatch.setattr(process_group.Channel, "note_connected", lambda self: (time.sleep(1), connect(self)))
        state = PartialState(cpu=True)
        begun = time.monotonic()
        state.destroy_process_group()
        return time.monotonic() - begun

    first, second = ranks(body, 2)
    assert first > 0.5  # it waited for the other
    assert second < first


FORKS = """
import os, sys
import accel_state.collectives.channel
from accel_state import forking
calls = []
read = sys._current_frames
sys._current_frames = lambda: calls.append(1) or read()
for _ in range(2):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
print(len(calls))
"""


def test_a_fork_waits_for_threads_that_hold_the_lock_it_would_inherit() -> None:
    said = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=True).stdout
    assert int(said) == (2 if sys.version_info < (3, 11, 8) else 0)


def test_a_forked_worker_neither_waits_for_ranks_nor_ends_their_group(ranks: Ranks) -> None:
    def body() -> Any:
        state = PartialState(cpu=True)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with state.main_process_first():
                    said = "went in"
            except ProcessGroupError as error:
                said = str(error)
            state.destroy_process_group()
            os.write(writer, said.encode())
            os._exit(0)
        os.close(writer)
        said = os.read(reader, 1000).decode()
        os.waitpid(child, 0)
        return said, gather(torch.tensor([state.process_index])).tolist()

    for said, gathered in ranks(body, 2):
        assert "in a forked process" in said
        assert gathered == [0, 1]
