"""Functions as ranks: forked, spawned, on the CPU; what is refused before, and whose error comes back."""

import os
import pickle
import socket
import sys
from pathlib import Path

import pytest

from accel_launch import PrepareForLaunch, debug_launcher, notebook_launcher
from accel_launch.notebook.checks import check_can_fork
from accel_state import PartialState
from accel_state.errors import LaunchError
from accel_state.settings import setting

# this file is imported by path; spawned ranks find its functions by their module's name
sys.path.insert(0, str(Path(__file__).parent))
from notebook_jobs import fail, note

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def no_state_yet():
    """As in a fresh notebook, whatever other tests have made in this process."""
    PartialState._reset_state()


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return str(found.getsockname()[1])


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_each_rank_runs_the_function(tmp_path, start_method, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    notebook_launcher(
        note, (str(tmp_path),), num_processes=2, mixed_precision="bf16", use_port=free_port(), start_method=start_method
    )
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "2 bf16 true", "1": "2 bf16 true"}
    assert "ACCEL_MIXED_PRECISION" not in os.environ and "FORK_LAUNCHED" not in os.environ


def test_debug_launcher_runs_on_the_cpu(tmp_path):
    debug_launcher(note, (str(tmp_path),), num_processes=3)
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["3 no true"] * 3


def test_the_error_of_a_rank_comes_back():
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with pytest.raises(ChildFailedError, match="the real cause"):
        debug_launcher(fail)


def test_a_restart_begins_anew(tmp_path):
    notebook_launcher(
        fail, (str(tmp_path),), num_processes=2, use_port=free_port(), rdzv_backend="c10d", max_restarts=1
    )
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "1-0", "0-1", "1-1"]
        or len(list(tmp_path.iterdir())) == 4
    )


def test_one_process_is_called_here():
    seen = []
    notebook_launcher(lambda word: seen.append((word, setting("mixed_precision"))), ("x",), 1, mixed_precision="bf16")
    assert seen == [("x", "bf16")]
    assert setting("mixed_precision") == "no"


def test_a_touched_device_is_named_before_the_fork(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(LaunchError, match=r"cuda was initialised before .* start_method='spawn'"):
        notebook_launcher(note, num_processes=2)
    with pytest.raises(LaunchError, match="bitsandbytes, imported here, may have done it"):
        check_can_fork(["sys", "bitsandbytes"])


def test_an_earlier_state_is_refused(monkeypatch):
    from accel_state import PartialState

    monkeypatch.setattr(PartialState, "_shared_state", {"device": "cpu"})
    with pytest.raises(LaunchError, match="was made before notebook_launcher was called"):
        notebook_launcher(note, num_processes=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"start_method": "forkserver"}, "start_method='forkserver' is not allowed"),
        ({"node_rank": 1}, "node_rank=1 contradicts num_nodes=1"),
        ({"mixed_precision": "fp12"}, "mixed_precision: 'fp12' is not allowed"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises((LaunchError, ValueError), match=words):
        notebook_launcher(note, num_processes=2, **options)


def test_a_prepared_function_sets_its_rank(tmp_path, monkeypatch):
    for name, text in (("WORLD_SIZE", "2"), ("RANK", ""), ("LOCAL_RANK", ""), ("FORK_LAUNCHED", "")):
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("ACCEL_MIXED_PRECISION", "no")
    prepared = pickle.loads(pickle.dumps(PrepareForLaunch(note, "MULTI_CPU")))
    prepared(1, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
