"""kill -9 of either of two ranks that save sharded tensors: the last committed checkpoint is whole, bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint.planner_helpers  # imported once, not by every child
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from accel_ckpt import Checkpointer, latest
from accel_state import PartialState, gather_object  # noqa: F401  likewise
from accel_testkit.faults import fork, watching
from accel_testkit.nets import value_of

FULL = "ACCEL_TEST_FAULTS" in os.environ
NUM_KILLS = 110 if FULL else 6  # of each kind
SEED = 11


@pytest.fixture
def memory_path():
    """A directory in memory: a kill loses nothing that a system call has written, flushed or not."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as path:
        yield Path(path)


def net_of(value: float) -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    for p in net.parameters():
        nn.init.constant_(p, value)
    return net


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def save_as_rank(
    directory: Path, rank: int, port: int, *, blocking: bool, kill_at: int | None, calls_file: Path
) -> None:
    """One of two ranks; ends itself before its n-th file-system call of the save."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    PartialState._reset_state()  # another test may have left that of one process, which a fork takes along
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (2,))
    net = net_of(2)
    for part in net:
        for name, p in list(part.named_parameters()):
            setattr(part, name, nn.Parameter(distribute_tensor(p.data, mesh, [Shard(0)])))
    ckpt = Checkpointer(directory, keep=latest(1))

    def kill(number: int, _name: str) -> None:
        if number == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with watching(kill) as trace:
        saved = ckpt.save(2, blocking=blocking, net=net)
        if not blocking:
            saved.wait()
    calls_file.write_text(str(len(trace.calls)))
    torch.distributed.destroy_process_group()


def two_ranks(directory: Path, victim: int, *, blocking: bool, kill_at: int | None) -> list[int]:
    """Save on two ranks of which one dies; the other is ended soon after, as a launcher does. Calls made by each."""
    port, said = free_port(), [directory.parent / f"calls-{rank}" for rank in (0, 1)]
    for file in said:
        file.unlink(missing_ok=True)

    def child(rank: int) -> int:
        at = kill_at if rank == victim else None
        return fork(lambda: save_as_rank(directory, rank, port, blocking=blocking, kill_at=at, calls_file=said[rank]))

    pids = [child(rank) for rank in (0, 1)]
    if kill_at is not None:
        os.waitpid(pids[victim], 0)
        time.sleep(0.05)
        os.kill(pids[1 - victim], signal.SIGKILL)
        os.waitpid(pids[1 - victim], 0)
        return []
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0
    return [int(file.read_text()) for file in said]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("blocking", [True, False])
def test_killed_before_any_call_of_any_rank(memory_path, blocking):
    root = memory_path / "run"

    def set_up() -> None:
        shutil.rmtree(root, ignore_errors=True)
        Checkpointer(root, keep=latest(1)).save(1, net=net_of(1))
        (root / "notes.txt").write_text("mine")

    set_up()
    counts = two_ranks(root, 0, blocking=blocking, kill_at=None)
    assert min(counts) > 3
    chance = random.Random(SEED)
    points = [(victim, number) for victim in (0, 1) for number in range(counts[victim])]
    chance.shuffle(points)
    seen = set()
    for victim, number in (points * (1 + NUM_KILLS // len(points)))[:NUM_KILLS]:
        set_up()
        two_ranks(root, victim, blocking=blocking, kill_at=number)
        ckpt, net = Checkpointer(root, keep=latest(1)), net_of(-1)
        step = ckpt.restore(net=net)
        assert value_of(net) == step
        seen.add(step)
        assert (root / "notes.txt").read_text() == "mine"
        ckpt.save(3, net=net_of(3))
        assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []
        assert ckpt.restore(net=net) == 3
    assert seen <= {1, 2}
    assert 1 in seen
