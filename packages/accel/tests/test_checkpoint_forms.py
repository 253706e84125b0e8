"""Checkpoints of two forms in one directory, loading what fits of the peer's files, and checkpoints on each node."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import accel_ckpt
from accel import Accelerator, ProjectConfiguration
from accel_state import AcceleratorState
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError


class Run:
    """A model and a momentum optimizer whose state follows from one number."""

    def __init__(self, folder, value: float = 0.0, **project) -> None:
        config = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, **project)
        self.accelerator = Accelerator(cpu=True, project_config=config)
        model = nn.Linear(2, 2)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), momentum=0.9))
        self.fill(value)

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.fill_(value)
                self.optimizer.state[p] = {"momentum_buffer": torch.full_like(p, value + 0.5)}

    def values(self) -> set[float]:
        """The number, as each tensor tells it."""
        found = {number for p in self.model.parameters() for number in p.reshape(-1).tolist()}
        buffers = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return found | {number - 0.5 for buffer in buffers for number in buffer.reshape(-1).tolist()}

    def write_theirs(self, number: int, value: float):
        """What the peer would have written at this iteration."""
        self.fill(value)
        path = Path(self.accelerator.project_dir, "checkpoints", f"checkpoint_{number}")
        model = self.accelerator.unwrap_model(self.model)
        accel_ckpt.save_accelerator_state(path, [model.state_dict()], [self.optimizer], [], [], 0, number)
        return path


def test_a_run_goes_on_from_the_peers_newest_and_counts_on(tmp_path):
    first = Run(tmp_path)
    for number in (0, 1, 2):
        first.write_theirs(number, number)
    with pytest.raises(CheckpointError, match="up to checkpoint_2 of an earlier run"):
        Run(tmp_path).accelerator.save_state()
    run = Run(tmp_path, value=9)
    run.accelerator.load_state()
    assert run.values() == {2.0}
    assert run.accelerator.step == 2
    assert run.accelerator.save_iteration == 3
    run.fill(3)
    assert run.accelerator.save_state() == str(tmp_path / "checkpoints" / "checkpoint_3")
    again = Run(tmp_path, value=9)
    again.accelerator.load_state()
    assert again.values() == {3.0}


def test_the_newest_is_loaded_whatever_its_form(tmp_path):
    run = Run(tmp_path)
    run.fill(1)
    run.accelerator.save_state()
    run.fill(2)
    run.accelerator.save_state(safe_serialization=False)
    run.write_theirs(2, 3)
    for expected in (3.0, 2.0, 1.0):
        again = Run(tmp_path, value=9)
        again.accelerator.load_state()
        assert again.values() == {expected}
        assert again.accelerator.save_iteration == expected
        (tmp_path / "checkpoints" / f"checkpoint_{int(expected) - 1}").rename(tmp_path / f"moved-{expected}")


def test_the_peers_checkpoints_are_neither_counted_nor_removed(tmp_path):
    run = Run(tmp_path, total_limit=1)
    theirs = [run.write_theirs(number, number) for number in (0, 1)]
    run.accelerator.load_state()
    for _ in range(3):
        run.accelerator.save_state()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_0", "checkpoint_1", "checkpoint_4"]
    assert all((path / "optimizer.bin").is_file() for path in theirs)


def test_damaged_and_unfinished_ones_of_the_peer_are_passed_over(tmp_path):
    run = Run(tmp_path)
    run.write_theirs(0, 1)
    damaged, unfinished = run.write_theirs(1, 2), run.write_theirs(2, 3)
    os.truncate(damaged / "optimizer.bin", 100)
    (unfinished / "random_states_0.pkl").unlink()
    again = Run(tmp_path, value=9)
    with pytest.warns(RuntimeWarning, match="falling back") as caught:
        again.accelerator.load_state()
    assert again.values() == {1.0}
    assert again.accelerator.save_iteration == 3
    said = [str(warning.message) for warning in caught]
    assert "checkpoint_2" in said[0]
    assert "optimizer.bin is damaged" in said[1]


@pytest.mark.parametrize("theirs", [True, False])
def test_not_strict_loads_what_fits_of_torch_files(tmp_path, theirs):
    run = Run(tmp_path)
    if theirs:
        path = run.write_theirs(0, 1)
    else:
        run.fill(1)
        path = run.accelerator.save_state(safe_serialization=False)
    accelerator = Accelerator(cpu=True)
    wider = nn.Linear(2, 2)
    wider.register_parameter("more", nn.Parameter(torch.full((3,), 7.0)))
    wider, _ = accelerator.prepare(wider, nn.Linear(1, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(wider.parameters(), momentum=0.9))
    before = wider.weight.tolist()
    with pytest.raises(CheckpointError, match=r"no weights for model 1|more: missing"):
        accelerator.load_state(path)
    assert wider.weight.tolist() == before
    with pytest.warns(RuntimeWarning, match="left out") as caught:
        accelerator.load_state(path, strict=False)
    (said,) = {str(w.message) for w in caught if "left out" in str(w.message)}
    assert "model 0: more: missing in the checkpoint" in said
    assert "no weights for model 1" in said
    assert "optimizer.bin: groups of [2] parameters, SGD has groups of [3]" in said
    assert {number for row in wider.weight.tolist() for number in row} == {1.0}
    assert wider.more.tolist() == [7.0] * 3
    assert not optimizer.state


def test_an_object_more_than_there_were_changes_nothing(tmp_path):
    path = Run(tmp_path).write_theirs(0, 1)
    run = Run(tmp_path, value=9)
    run.accelerator.register_for_checkpointing(torch.amp.GradScaler("cpu"))
    with pytest.raises(CheckpointError, match=r"no custom_checkpoint_0\.pkl for GradScaler"):
        run.accelerator.load_state(path)
    assert run.values() == {9.0}
    other = Accelerator(cpu=True)
    model = other.prepare(nn.Linear(2, 3))
    weight = model.weight.tolist()
    with pytest.raises(CheckpointMismatchError, match=r"weight: shape \(2, 2\) in the checkpoint, \(3, 2\) here"):
        other.load_state(path)
    assert model.weight.tolist() == weight


def _load_one_damaged_on_two_ranks(folder):
    run = Run(folder, value=9)
    said = []
    for path in (folder / "theirs", None):
        try:
            run.accelerator.load_state(path)
        except CheckpointCorruptError as error:
            said.append(str(error))
    values, number = run.values(), run.accelerator.save_iteration
    AcceleratorState._reset_state()
    return said, values, number


def test_ranks_load_and_fail_together(tmp_path, ranks):
    run = Run(tmp_path)
    run.write_theirs(0, 4)
    torch.save({"step": 0}, tmp_path / "checkpoints" / "checkpoint_0" / "random_states_1.pkl")
    run.write_theirs(1, 5).rename(tmp_path / "theirs")
    (tmp_path / "theirs" / "random_states_1.pkl").write_bytes(b"damaged")  # of rank 1 alone
    one, two = ranks(_load_one_damaged_on_two_ranks, 2, tmp_path)
    assert one == two
    assert "rank 1: " in one[0][0]
    assert one[1:] == ({4.0}, 1)


# ---------------------------------------------------------------- each node its own


def _save_on_each_node(folder, safe):
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": "2"}
    disk = folder / f"disk-{rank}"
    run = Run(disk, value=3, save_on_each_node=True, total_limit=1)
    for blocking in (False, True):
        run.accelerator.save_state(safe_serialization=safe, blocking=blocking)
    draw = torch.rand(1).item()
    run.accelerator.save_model(run.model, disk / "weights")
    run.accelerator.save([rank], disk / "object.pt")
    run.fill(9)
    run.accelerator.load_state()
    result = run.values(), torch.rand(1).item() == draw, run.accelerator.save_iteration
    AcceleratorState._reset_state()
    return result


def _lose_one_nodes_newest(folder):
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": "2"}
    run = Run(folder / f"disk-{rank}", save_on_each_node=True)
    for value in (1, 2):
        run.fill(value)
        newest = run.accelerator.save_state()
    if rank == 1:
        (Path(newest) / "manifest.json").unlink()
    run.accelerator.wait_for_everyone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.accelerator.load_state()
    result = run.values(), run.accelerator.save_iteration, [str(warning.message) for warning in caught]
    AcceleratorState._reset_state()
    return result


def test_what_one_node_has_lost_is_passed_over_by_all(tmp_path, ranks):
    one, two = ranks(_lose_one_nodes_newest, 2, tmp_path)
    assert one[:2] == two[:2] == ({1.0}, 2)
    assert "the ranks find different things" in one[2][0]
    assert "rank 1: no checkpoint" in one[2][0]
    assert two[2] == []


@pytest.mark.parametrize("safe", [True, False])
def test_each_nodes_main_process_saves_and_loads_its_own(tmp_path, ranks, safe):
    assert ranks(_save_on_each_node, 2, tmp_path, safe) == [({3.0}, True, 2)] * 2
    for node in range(2):
        disk = tmp_path / f"disk-{node}"
        assert [path.name for path in (disk / "checkpoints").iterdir()] == ["checkpoint_1"]
        manifest = accel_ckpt.verify_checkpoint(disk / "checkpoints" / "checkpoint_1")
        assert {"random_states_0.json", "random_states_1.json"} <= manifest.files.keys()
        assert (disk / "weights" / "model.safetensors").is_file()
        assert accel_ckpt.load(disk / "object.pt") == [node]
