"""Checkpoints cross over: accelerate's load here, ours load there after `accel ckpt convert`, or saved as its files.

Needs the environment in which the benchmarks run the peer; `tools/dev bench` makes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_ckpt import verify_checkpoint
from accel_ckpt.commands import register

RUN = Path(__file__).with_name("peer_run.py")
PEER = Path(__file__).parents[2] / ".cache" / "peer-env" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PEER.exists(), reason=f"no environment of the peer at {PEER}")


def run(library: str, action: str, directory: Path, ranks: int = 1, **options) -> list:
    """What `peer_run.py` tells, by rank."""
    command = [str(PEER if library == "accelerate" else sys.executable)]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(RUN), library, action, str(directory), json.dumps(options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("safe", [True, False])
def test_what_the_peer_saved_goes_on_here(tmp_path, safe):
    expected = run("accelerate", "save", tmp_path / "c", safe_serialization=safe)
    assert run("accel", "load", tmp_path / "c") == expected


def test_a_project_of_the_peers_goes_on_here_on_two_ranks(tmp_path):
    """The newest of its checkpoints is found, each rank gets its generators back, and numbers go on."""
    expected = run("accelerate", "save", tmp_path, ranks=2, automatic=True)
    assert expected[0][1] != expected[1][1]
    assert run("accel", "load", tmp_path, ranks=2, automatic=True) == expected
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert verify_checkpoint(tmp_path / "checkpoints" / "checkpoint_2").world_size == 2
    assert run("accel", "load", tmp_path / "checkpoints" / "checkpoint_2", ranks=2) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_we_saved_goes_on_there(tmp_path, capsys, ranks):
    import argparse

    expected = run("accel", "save", tmp_path / "c", ranks=ranks)
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    arguments = ["ckpt", "convert", str(tmp_path / "c"), str(tmp_path / "there"), "--to", "accelerate"]
    parsed = parser.parse_args(arguments)
    assert parsed.func(parsed) == 0
    assert "DataLoader" in capsys.readouterr().out
    assert run("accelerate", "load", tmp_path / "there", ranks=ranks) == expected


def test_torch_files_that_we_saved_go_on_there_and_here(tmp_path):
    expected = run("accel", "save", tmp_path / "c", safe_serialization=False)
    assert run("accelerate", "load", tmp_path / "c") == expected
    assert run("accel", "load", tmp_path / "c") == expected


def test_what_the_peers_writer_is_called_with_serves_its_reader(tmp_path):
    """`save_accelerator_state` by the peer's signature, read by the peer's `load_accelerator_state`."""
    from torch import nn

    from accel_ckpt import save_accelerator_state

    net = nn.Linear(2, 1)
    save_accelerator_state(tmp_path / "c", [net.state_dict()], [], [], [], 0, 7, safe_serialization=False)
    code = (
        "import sys, json, torch\nfrom accelerate import PartialState\n"
        "from accelerate.checkpointing import load_accelerator_state as load\nPartialState(cpu=True)\n"
        "net = torch.nn.Linear(2, 1)\nload(sys.argv[1], [net], [], [], [], 0)\nprint(json.dumps(net.weight.tolist()))"
    )
    done = subprocess.run([PEER, "-c", code, tmp_path / "c"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == net.weight.tolist()
