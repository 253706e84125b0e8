"""Kills, damage, full disks and hostile files: the last committed checkpoint survives all of them, and runs no code."""

from __future__ import annotations

import errno
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_ckpt import Checkpointer, latest, load_checkpoint, save_checkpoint, verify_checkpoint
from accel_state.errors import CheckpointCorruptError, CheckpointError
from accel_testkit.faults import count_calls, failing_at, in_child, killed_after, killed_at, spread

NUM_KILL_POINTS = 1000 if "ACCEL_TEST_FAULTS" in os.environ else 25  # all that there are
SEED = 20


class Run:
    """A model and an optimizer whose whole state follows from one number."""

    def __init__(self, value: float = 0) -> None:
        self.net = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 1))
        self.opt = torch.optim.Adam(self.net.parameters())
        with torch.no_grad():
            for p in self.net.parameters():
                p.fill_(value)
                self.opt.state[p] = {"step": torch.tensor(value), "exp_avg": p + 1, "exp_avg_sq": p + 2}

    @property
    def objects(self) -> dict:
        return {"net": self.net, "opt": self.opt}

    def values(self) -> set[float]:
        """The number, as each tensor tells it: one if the state is whole."""
        found = set()
        for p in self.net.parameters():
            state = self.opt.state[p]
            for tensor, shift in ((p, 0), (state["step"], 0), (state["exp_avg"], 1), (state["exp_avg_sq"], 2)):
                found |= {value - shift for value in tensor.reshape(-1).tolist()}
        return found


def loaded(directory) -> float:
    run = Run(-1)
    load_checkpoint(directory, run.objects)
    (value,) = run.values()
    return value


def leftovers(directory) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


@pytest.fixture
def memory_path(tmp_path):
    """A directory in memory where there is one: a kill loses nothing that a system call has written, flushed or not."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


# ---------------------------------------------------------------- kill -9


def test_killed_before_any_call_of_a_save_into_a_new_directory(memory_path):
    """The last checkpoint is whole at each point; which one is last turns once, at the commit."""

    def set_up(directory) -> Checkpointer:
        shutil.rmtree(directory, ignore_errors=True)
        ckpt = Checkpointer(directory, keep=latest(1))
        ckpt.save(1, **Run(1).objects)
        (directory / "notes.txt").write_text("mine")
        return ckpt

    ckpt = set_up(memory_path / "c")
    total = len(count_calls(lambda: ckpt.save(2, **Run(2).objects)))
    last = []
    for number in spread(total, NUM_KILL_POINTS, SEED):
        ckpt = set_up(memory_path / "c")
        assert killed_at(number, lambda ckpt=ckpt: ckpt.save(2, **Run(2).objects))
        run = Run(-1)
        last.append(ckpt.restore(**run.objects))
        assert run.values() == {float(last[-1])}
        assert (memory_path / "c" / "notes.txt").read_text() == "mine"
        ckpt.save(3, **Run(3).objects)
        assert leftovers(memory_path / "c") == []
        assert ckpt.restore(**run.objects) == 3
    assert last == sorted(last)
    assert set(last) == {1, 2}


def test_killed_before_any_call_of_a_save_into_an_existing_directory(memory_path):
    target = memory_path / "c"

    def set_up() -> None:
        shutil.rmtree(target, ignore_errors=True)
        save_checkpoint(target, {**Run(1).objects, "more": nn.Linear(1, 1)})
        (target / "notes.txt").write_text("mine")

    def replace() -> None:
        save_checkpoint(target, Run(2).objects)

    set_up()
    total = len(count_calls(replace))
    last = []
    for number in spread(total, NUM_KILL_POINTS, SEED):
        set_up()
        assert killed_at(number, replace)
        verify_checkpoint(target)
        last.append(loaded(target))
        assert (target / "notes.txt").read_text() == "mine"
        save_checkpoint(target, Run(3).objects)
        assert loaded(target) == 3
        assert leftovers(target) == []
        assert sorted(path.suffix for path in target.iterdir()) == [".json"] * 3 + [".safetensors"] * 2 + [".txt"]
    assert last == sorted(last)
    assert set(last) == {1, 2}


def test_killed_while_the_next_save_completes_a_replacement(memory_path):
    """A kill, then another during the recovery from the first."""
    target = memory_path / "c"

    def replace(value: float) -> None:
        save_checkpoint(target, Run(value).objects)

    replace(1)
    first = count_calls(lambda: replace(1)).index("replace")
    for second in range(0, 14, 2):
        shutil.rmtree(target)
        replace(1)
        assert killed_at(first + 1, lambda: replace(2))
        assert killed_at(second, lambda: replace(3))
        assert loaded(target) == 2
        replace(4)
        assert loaded(target) == 4
        assert leftovers(target) == []


def test_killed_at_random_times(memory_path):
    chance = random.Random(SEED)
    ckpt = Checkpointer(memory_path / "c", keep=latest(2))
    ckpt.save(0, **Run(0).objects)

    def save_for_ever(start: int) -> None:
        for step in range(start, start + 10_000):
            ckpt.save(step, **Run(step).objects)

    for _ in range(12):
        newest = ckpt.latest().step
        assert killed_after(chance.uniform(0.0, 0.12), lambda start=newest + 1: save_for_ever(start))
        run = Run(-1)
        step = ckpt.restore(**run.objects)
        assert step >= newest
        assert run.values() == {float(step)}
    ckpt.save(10**6, **Run(5).objects)
    assert leftovers(memory_path / "c") == []
    assert ckpt.latest().step > 30


# ---------------------------------------------------------------- full and read-only disks


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
def test_any_call_of_a_save_can_fail(tmp_path, code):
    ckpt = Checkpointer(tmp_path / "c")
    ckpt.save(1, **Run(1).objects)
    calls = count_calls(lambda: ckpt.save(2, **Run(2).objects))
    before_commit = calls.index("rename")
    for number in range(before_commit):
        with (
            failing_at(number, code),
            pytest.raises(CheckpointError, match=r"saving to|cannot commit|disk|quota|read-only"),
        ):
            ckpt.save(3, **Run(3).objects)
        assert leftovers(tmp_path / "c") == []
        assert [info.step for info in ckpt.all()] == [1, 2]
    assert loaded(tmp_path / "c" / "step-2") == 2


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB, where we may mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if (
        sys.platform != "linux"
        or os.geteuid() != 0
        or subprocess.run(command, check=False, capture_output=True).returncode
    ):
        pytest.skip("needs root to mount a small tmpfs; the injected failures above cover the same paths")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk(small_disk):
    ckpt = Checkpointer(small_disk / "c")
    ckpt.save(1, **Run(1).objects)
    with pytest.raises(CheckpointError, match="the disk is full; free some space and save again"):
        ckpt.save(2, big=nn.Linear(1000, 1000))
    assert leftovers(small_disk / "c") == []
    assert loaded(small_disk / "c" / "step-1") == 1
    with pytest.raises(CheckpointError, match="the disk is full"):
        save_checkpoint(small_disk / "c" / "step-1", {"big": nn.Linear(1000, 1000)})
    assert loaded(small_disk / "c" / "step-1") == 1
    assert leftovers(small_disk / "c" / "step-1") == []


def test_a_read_only_disk_and_a_mount_point(small_disk):
    save_checkpoint(small_disk, Run(1).objects)  # nothing can be renamed over a mount point
    save_checkpoint(small_disk, Run(2).objects)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match="the file system is read-only; choose another directory"):
        save_checkpoint(small_disk, Run(3).objects)
    assert loaded(small_disk) == 2


# ---------------------------------------------------------------- damage


def truncate(path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path) -> None:
    path.write_bytes(b"")


def flip(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def delete(path) -> None:
    path.unlink()


def rename(path) -> None:
    path.rename(path.with_name("other"))


def link(path) -> None:
    path.rename(path.parent.parent / path.name)
    path.symlink_to(path.parent.parent / path.name)


def directory(path) -> None:
    path.unlink()
    path.mkdir()


FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "random_states_0.json", "manifest.json"]


DAMAGES = [truncate, empty, flip, delete, rename, directory]


@pytest.mark.parametrize(
    ("file", "damage"),
    [*((file, damage) for file in FILES for damage in DAMAGES), *((file, link) for file in FILES[:-1])],
)
def test_damage_is_found_and_named(tmp_path, file, damage):
    save_checkpoint(tmp_path / "c", Run(1).objects)
    damage(tmp_path / "c" / file)
    run = Run(7)
    with pytest.raises(CheckpointCorruptError, match=file.replace(".", r"\.")):
        load_checkpoint(tmp_path / "c", run.objects)
    assert run.values() == {7.0}


def test_every_flipped_bit_is_noticed(tmp_path):
    """Single bits all over the tensors' file: sizes, header, padding, data."""
    save_checkpoint(tmp_path / "c", Run(1).objects)
    path = tmp_path / "c" / "model.safetensors"
    whole = path.read_bytes()
    for place in sorted(random.Random(SEED).sample(range(len(whole)), 60)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointCorruptError, match=r"model\.safetensors was altered"):
            verify_checkpoint(tmp_path / "c")
    path.write_bytes(whole)
    verify_checkpoint(tmp_path / "c")


# ---------------------------------------------------------------- hostile files


class Bomb:
    def __reduce__(self):
        return sys.exit, (66,)


LEGACY = [
    "pytorch_model.bin",
    "optimizer.bin",
    "optimizer.pt",
    "scheduler.bin",
    "sampler.bin",
    "scaler.pt",
    "random_states_0.pkl",
    "custom_checkpoint_0.pkl",
    "data.pkl",
    "model.pt",
]


def test_no_unpickler_is_reached(tmp_path):
    """Pickles under every legacy name beside the checkpoint, and one in place of each file of its own."""
    save_checkpoint(tmp_path / "c", Run(1).objects)
    bomb = pickle.dumps(Bomb())
    for name in LEGACY:
        (tmp_path / "c" / name).write_bytes(bomb)

    def load_under_an_audit() -> None:
        reached: list[str] = []
        sys.addaudithook(lambda event, args: event.startswith("pickle") and reached.append(event))
        run = Run(-1)
        load_checkpoint(tmp_path / "c", run.objects)
        assert run.values() == {1.0}
        for name in FILES:
            (tmp_path / "c" / name).write_bytes(bomb)
            with pytest.raises(CheckpointCorruptError):
                load_checkpoint(tmp_path / "c", run.objects)
        assert reached == []
        with pytest.raises(SystemExit):
            pickle.loads(bomb)
        assert reached, "the audit hears nothing"

    in_child(load_under_an_audit)  # an audit hook stays for the life of its process
