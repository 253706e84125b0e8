"""A directory of checkpoints: the newest whole one, retention, saves in the background."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from accel_ckpt import Checkpointer, best, every, latest, save_checkpoint, save_in_background, verify_checkpoint
from accel_state.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)


def filled(value: float) -> nn.Module:
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, value)
    return net


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def flip(path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_it_restores_the_newest(tmp_path):
    ckpt = Checkpointer(tmp_path / "c")
    assert ckpt.latest() is None
    assert ckpt.all() == []
    for step in (2, 9, 10):
        assert ckpt.save(step, net=filled(step)) == tmp_path / "c" / f"step-{step}"
    with pytest.raises(CheckpointError, match=r"step=5 is below step-10"):
        ckpt.save(5, net=filled(5))  # neither found again nor kept
    assert [info.step for info in ckpt.all()] == [2, 9, 10]
    assert ckpt.latest().path == tmp_path / "c" / "step-10"
    net = filled(0)
    assert ckpt.restore(net=net) == 10
    assert net.weight[0, 0] == 10
    assert ckpt.restore(step=9, net=net) == 9
    assert net.weight[0, 0] == 9


def test_directories_can_be_named_otherwise(tmp_path):
    ckpt = Checkpointer(tmp_path, keep=latest(1), prefix="checkpoint_")
    (tmp_path / "step-7").mkdir()
    ckpt.save(1, net=filled(1))
    ckpt.save(2, net=filled(2))
    assert names(tmp_path) == ["checkpoint_2", "step-7"]
    assert ckpt.restore(net=filled(0)) == 2


def test_nothing_to_restore(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint in"):
        Checkpointer(tmp_path / "none").restore(net=filled(0))
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-3").write_text("a file")
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint in"):
        Checkpointer(tmp_path).restore(net=filled(0))
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of step 4"):
        Checkpointer(tmp_path).restore(step=4, net=filled(0))


@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "manifest.json", "random_states_0.json"])
def test_a_damaged_newest_falls_back_and_says_why(tmp_path, file):
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, net=filled(1))
    ckpt.save(2, net=filled(2))
    flip(tmp_path / "step-2" / file, 20)
    net = filled(0)
    with pytest.warns(RuntimeWarning, match=f"falling back to the checkpoint before: .*{file}"):
        assert ckpt.restore(net=net) == 1
    assert net.weight[0, 0] == 1
    with pytest.raises(CheckpointCorruptError, match=file):
        ckpt.restore(step=2, net=net)
    flip(tmp_path / "step-1" / "model.safetensors")
    with (
        pytest.warns(RuntimeWarning, match="falling back"),
        pytest.raises(CheckpointCorruptError, match=r"is whole: .*; "),
    ):
        ckpt.restore(net=net)


def test_a_mismatch_does_not_fall_back(tmp_path):
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, net=nn.Linear(2, 2))
    ckpt.save(2, net=nn.Linear(3, 2))
    with pytest.raises(CheckpointMismatchError, match="step-2 does not fit"):
        ckpt.restore(net=nn.Linear(2, 2))


def test_a_step_saved_again_takes_the_place_of_the_first(tmp_path):
    ckpt = Checkpointer(tmp_path, keep=latest(2))
    ckpt.save(1, net=filled(1))
    ckpt.save(2, net=filled(2))
    assert ckpt.save(2, net=filled(20)) == tmp_path / "step-2.2"
    net = filled(0)
    assert ckpt.restore(net=net) == 2
    assert net.weight[0, 0] == 20
    assert [info.path.name for info in ckpt.all()] == ["step-1", "step-2.2"]
    assert names(tmp_path) == ["step-1", "step-2.2"]


def kept(tmp_path, keep, losses) -> list[int]:
    ckpt = Checkpointer(tmp_path, keep=keep)
    for step, loss in enumerate(losses):
        ckpt.save(step, metrics={"loss": loss}, net=filled(step))
    return [info.step for info in ckpt.all()]


@pytest.mark.parametrize(
    ("keep", "want"),
    [
        (None, [0, 1, 2, 3, 4, 5]),
        (latest(1), [5]),
        (latest(3), [3, 4, 5]),
        (every(2), [0, 2, 4, 5]),
        (best("loss"), [2, 5]),
        (best("loss", n=2, mode="max"), [1, 3, 5]),
        (latest(2) | best("loss"), [2, 4, 5]),
        (latest(1) | best("loss") | every(3), [0, 2, 3, 5]),
    ],
    ids=repr,
)
def test_retention_rules(tmp_path, keep, want):
    assert kept(tmp_path, keep, [float("nan"), 5.0, 1.0, 5.0, 2.0, 3.0]) == want


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: latest(0), r"latest\(n=0\)"),
        (lambda: every(True), r"every\(k=True\)"),
        (lambda: best("loss", n=-1), r"best\(n=-1\)"),
        (lambda: best("loss", mode="low"), "allowed are 'min' and 'max'"),
    ],
)
def test_rules_check_their_numbers(make, message):
    with pytest.raises(CheckpointError, match=message):
        make()


def test_a_rule_needs_its_metric(tmp_path):
    ckpt = Checkpointer(tmp_path, keep=best("loss") | latest(1))
    with pytest.raises(CheckpointError, match=r"keep=best\('loss'.*pass metrics="):
        ckpt.save(1, metrics={"acc": 1.0}, net=filled(1))
    assert names(tmp_path) == []


def test_pruning_touches_only_what_is_ours(tmp_path):
    ckpt = Checkpointer(tmp_path, keep=latest(1))
    (tmp_path / "step-0").mkdir()
    (tmp_path / "step-0" / "notes.txt").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    ckpt.save(1, net=filled(1))
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    ckpt.save(2, net=filled(2))
    flip(tmp_path / "step-2" / "manifest.json", 50)
    ckpt.save(3, net=filled(3))
    ckpt.save(4, net=filled(4))
    assert names(tmp_path) == ["notes.txt", "step-0", "step-1", "step-2", "step-4"]
    assert names(tmp_path / "step-1") == ["notes.txt"]
    assert names(tmp_path / "step-2") == ["manifest.json", "model.safetensors", "random_states_0.json", "state.json"]


def test_metadata_and_metrics_are_listed(tmp_path):
    Checkpointer(tmp_path).save(1, metrics={"loss": 0.5}, metadata={"epoch": 2}, net=filled(1))
    assert Checkpointer(tmp_path).latest().metrics == {"loss": 0.5}


# ---------------------------------------------------------------- in the background


class Gate:
    """An object whose tensors cannot be written before the gate opens: it stands in for a slow disk."""

    def __init__(self, monkeypatch) -> None:
        import accel_ckpt.saving as module

        self.open, self.reached = threading.Event(), threading.Event()
        original = module.write_snapshot

        def slow(*args, **kwargs):
            self.reached.set()
            assert self.open.wait(30)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, "write_snapshot", slow)


def test_a_background_save_keeps_the_values_of_the_call(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    net = filled(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    buffer = optimizer.state[net.weight]["momentum_buffer"]
    want, want_buffer = net.weight.tolist(), buffer.tolist()
    ckpt = Checkpointer(tmp_path / "c", keep=latest(1))
    handle = ckpt.save(1, blocking=False, net=net, optimizer=optimizer)
    assert gate.reached.wait(30)
    assert not handle.done()
    assert ckpt.latest() is None
    with torch.no_grad():
        net.weight.add_(1)
        buffer.add_(1)
    gate.open.set()
    assert handle.wait() == handle.wait() == tmp_path / "c" / "step-1"
    assert handle.done()
    ckpt.restore(net=net, optimizer=optimizer)
    assert net.weight.tolist() == want
    assert optimizer.state[net.weight]["momentum_buffer"].tolist() == want_buffer


def test_one_background_save_at_a_time(tmp_path):
    ckpt = Checkpointer(tmp_path, keep=latest(1))
    net = filled(0)
    for step in range(5):
        nn.init.constant_(net.weight, step)
        ckpt.save(step, blocking=False, net=net)
    nn.init.constant_(net.weight, 99)
    assert ckpt.restore(net=net) == 4
    assert net.weight[0, 0] == 4
    assert names(tmp_path) == ["step-4"]


def test_a_background_failure_comes_out_at_wait_or_the_next_save(tmp_path, monkeypatch, caplog):
    import accel_ckpt.saving as module

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, net=filled(1))
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_snapshot", full)
        handle = ckpt.save(2, blocking=False, net=filled(2))
        with pytest.raises(CheckpointError, match="the disk is full"):
            handle.wait()
    assert "in the background failed" in caplog.text
    with pytest.raises(CheckpointError, match="the disk is full"):
        ckpt.save(3, net=filled(3))
    ckpt.save(3, net=filled(3))
    assert names(tmp_path) == ["step-1", "step-3"]


def test_two_background_saves_to_one_place_are_refused(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    handle = save_in_background(tmp_path / "c", {"net": filled(1)})
    with pytest.raises(CheckpointError, match=r"process .* is saving to .*c right now"):
        save_checkpoint(tmp_path / "c", {"net": filled(2)})
    gate.open.set()
    verify_checkpoint(handle.wait())
    assert names(tmp_path) == ["c"]


def test_the_process_does_not_exit_before_the_commit(tmp_path):
    code = f"""
import time
import accel_ckpt.saving as module
from accel_ckpt import Checkpointer
original = module.write_snapshot
module.write_snapshot = lambda *args, **kwargs: time.sleep(0.5) or original(*args, **kwargs)
Checkpointer({str(tmp_path)!r}).save(1, blocking=False)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    verify_checkpoint(tmp_path / "step-1")


def test_an_error_of_what_follows_the_commit_is_raised_by_wait(tmp_path):
    def fail() -> None:
        raise ValueError("after")

    handle = save_in_background(tmp_path / "c", {"net": filled(1)}, on_commit=fail)
    with pytest.raises(CheckpointError, match="ValueError: after"):
        handle.wait()
    verify_checkpoint(tmp_path / "c")
