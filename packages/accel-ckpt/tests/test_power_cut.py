"""A power cut after any call of a save: what was flushed is a whole checkpoint, the old one or the new one."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from torch import nn

from accel_ckpt import Checkpointer, latest, load_checkpoint, read_weights, save_checkpoint, save_model
from accel_testkit.disk import Disk, recording
from accel_testkit.nets import value_of


def net(value: float, layers: int = 2) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return model


def cuts(root, action, tmp_path, counts=lambda call: True):
    """After the n-th call of an action, for every n: the tree that a power cut leaves, and whether all calls were made.

    Calls that do not count are left out, as if they had not been made.
    """
    shutil.copytree(root, tmp_path / "before")
    with recording(root) as calls:
        action()
    calls = [call for call in calls if counts(call)]
    assert len(calls) > 10
    for entries_at_once in (False, True):
        disk = Disk(tmp_path / "before")
        for number in range(len(calls) + 1):
            left = tmp_path / f"cut-{entries_at_once}-{number}"
            disk.write(left, entries_at_once=entries_at_once)
            yield left, number == len(calls)
            shutil.rmtree(left)
            if number < len(calls):
                disk.replay(calls[number])


def leftovers(directory) -> list[str]:
    return [path.name for path in directory.rglob(".*")]


def test_a_save_into_a_new_directory(tmp_path):
    root = tmp_path / "root"
    ckpt = Checkpointer(root / "c", keep=latest(1))
    ckpt.save(1, net=net(1))
    steps = set()
    for left, whole in cuts(root, lambda: ckpt.save(2, net=net(2)), tmp_path):
        model, again = net(-1), Checkpointer(left / "c", keep=latest(1))
        steps.add(step := again.restore(net=model))
        assert value_of(model) == step
        assert step == 2 or not whole
        again.save(3, net=net(3))
        assert again.restore(net=model) == 3
        assert leftovers(left) == []
    assert steps == {1, 2}


def test_a_save_into_an_existing_directory(tmp_path):
    root = tmp_path / "root"
    save_checkpoint(root / "c", {"net": net(1), "more": net(1)})
    (root / "c" / "notes.txt").write_text("mine")
    seen = set()
    for left, whole in cuts(root, lambda: save_checkpoint(root / "c", {"net": net(2)}), tmp_path):
        model = net(-1)
        load_checkpoint(left / "c", {"net": model})
        seen.add(value_of(model))
        assert value_of(model) == 2 or not whole
        assert (left / "c" / "notes.txt").read_text() == "mine"
        save_checkpoint(left / "c", {"net": net(3)})
        load_checkpoint(left / "c", {"net": model})
        assert value_of(model) == 3
        assert leftovers(left) == []
    assert seen == {1, 2}


@pytest.mark.parametrize(("first", "second"), [(40, 40), ("1GB", 40), (40, "1GB"), ("1GB", "1GB")])
def test_weights_for_others(tmp_path, first, second):
    root = tmp_path / "root"
    save_model(net(1), root / "m", first)
    seen = set()
    for left, whole in cuts(root, lambda: save_model(net(2), root / "m", second), tmp_path):
        numbers: set[float] = set()
        read_weights(left / "m", lambda name, tensor: numbers.update(tensor.reshape(-1).tolist()))  # noqa: B023
        (value,) = numbers
        seen.add(value)
        assert value == 2 or not whole
    assert seen == {1, 2}


@pytest.mark.parametrize("kind", ["files", "directories"])
def test_a_save_that_does_not_flush_would_be_found_out(tmp_path, kind):
    """Without the flushes of one kind the new checkpoint is lost, or files of it are empty."""
    root = tmp_path / "root"
    ckpt = Checkpointer(root / "c")
    ckpt.save(1, net=net(1))
    directories = set()

    def counts(call) -> bool:
        if call.name == "open" and call.flags & os.O_DIRECTORY:
            directories.add(call.handle)
        return call.name != "fsync" or (call.handle in directories) == (kind == "files")

    ends = []
    for left, whole in cuts(root, lambda: ckpt.save(2, net=net(2)), tmp_path, counts):
        if whole:
            sizes = [path.stat().st_size for path in (left / "c").rglob("*.safetensors")]
            ends.append((len(sizes), min(sizes) > 0))
    assert ends == ([(2, False), (2, False)] if kind == "files" else [(1, True), (2, True)])
