"""The command line over checkpoints."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from torch import nn

from accel_ckpt import Checkpointer
from accel_ckpt.commands import register
from accel_state.errors import CheckpointError, CheckpointNotFoundError


def run(*argv) -> int:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    arguments = parser.parse_args(["ckpt", *map(str, argv)])
    return arguments.func(arguments)


@pytest.fixture
def directory(tmp_path):
    ckpt = Checkpointer(tmp_path)
    for step in (2, 10):
        ckpt.save(step, metrics={"loss": 1 / step}, metadata={"epoch": step}, net=nn.Linear(2, 3))
    return tmp_path


def test_list(directory, capsys):
    (directory / "notes").mkdir()
    assert run("list", directory) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step-2 ")
    assert first.endswith("loss=0.5")
    assert second.startswith("step-10 ")
    (directory / "step-2" / "manifest.json").write_text("{}")
    assert run("list", directory) == 1
    assert "step-2: " in capsys.readouterr().out.splitlines()[-1]


def test_list_of_nothing(tmp_path, capsys):
    assert run("list", tmp_path) == 0
    assert capsys.readouterr().out.startswith("no checkpoint in")
    with pytest.raises(CheckpointNotFoundError, match="there is no directory"):
        run("list", tmp_path / "none")


def test_inspect(directory, capsys):
    assert run("inspect", directory / "step-10") == 0
    text = capsys.readouterr().out
    for part in ("step: 10", "loss: 0.1", 'metadata: {"epoch": 10}', "net: model Linear, 2 tensors", "float32 [3, 2]"):
        assert part in text


def test_verify(directory, capsys):
    assert run("verify", directory / "step-10") == 0
    assert "files are whole" in capsys.readouterr().out
    (directory / "step-10" / "state.json").write_text("")
    assert run("verify", directory / "step-10") == 1
    assert "state.json has 0 bytes" in capsys.readouterr().out


def test_an_action_is_needed(capsys):
    with pytest.raises(SystemExit):
        run()
    assert "ACTION" in capsys.readouterr().err


def test_it_is_found_and_needs_no_torch_to_start():
    (found,) = [point for point in entry_points(group="accel.commands") if point.name == "ckpt"]
    assert found.value == "accel_ckpt.commands:register"
    code = "import sys, argparse, accel_ckpt.commands as c\nc.register(argparse.ArgumentParser().add_subparsers())\n"
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True, timeout=60)


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_prune_removes_what_no_rule_keeps(tmp_path, capsys):
    ckpt = Checkpointer(tmp_path)
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9), (4, 0.4), (5, 0.3)):
        ckpt.save(step, metrics={"loss": loss}, net=nn.Linear(2, 3))
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-9" / "mine").write_text("x")
    rules = ("--latest", 1, "--best", "loss", "--best-max", "loss")
    assert run("prune", tmp_path, *rules, "--dry-run") == 0
    assert capsys.readouterr().out.splitlines() == ["would remove step-1", "would remove step-4"]
    assert len(names(tmp_path)) == 6
    assert run("prune", tmp_path, *rules) == 0
    assert capsys.readouterr().out.splitlines() == ["removed step-1", "removed step-4"]
    assert names(tmp_path) == ["step-2", "step-3", "step-5", "step-9"]
    assert run("prune", tmp_path, "--every", 2) == 0
    assert names(tmp_path) == ["step-2", "step-5", "step-9"], "the newest stays"


def test_prune_asks_for_what_is_missing(directory):
    with pytest.raises(CheckpointError, match="prune needs a rule: --latest N"):
        run("prune", directory)
    with pytest.raises(CheckpointError, match="has the metric acc; known: loss"):
        run("prune", directory, "--best", "acc")
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint checkpoint_<number>"):
        run("prune", directory, "--latest", 1, "--prefix", "checkpoint_")
    assert names(directory) == ["step-10", "step-2"]
