"""Hostile and damaged files given to `Accelerator.load_state`: nothing runs, nothing changes, and the file is named."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import sys
import warnings

import pytest
import torch
from torch import nn

import accel_ckpt
from accel import Accelerator
from accel_state.errors import CheckpointCorruptError, CheckpointError
from accel_testkit.faults import in_child

LEGACY = ["optimizer.bin", "scheduler.bin", "scaler.pt", "random_states_0.pkl", "custom_checkpoint_0.pkl"]
UNREAD = ["sampler.bin", "dl_state_dict.bin", "optimizer_1.bin", "data.pkl", "pytorch_model.bin"]


class Bomb:
    def __reduce__(self):
        return sys.exit, (66,)


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Run:
    """One object of each kind that the peer's files hold, of one value each."""

    def __init__(self, value: float) -> None:
        self.accelerator = Accelerator(cpu=True, mixed_precision="fp16")
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=value)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        for p in self.model.parameters():
            nn.init.constant_(p, value)
        self.counter = Counter()
        self.counter.value = value
        self.accelerator.register_for_checkpointing(self.counter)

    def values(self) -> set[float]:
        numbers = {number for p in self.model.parameters() for number in p.reshape(-1).tolist()}
        return numbers | {self.counter.value, self.optimizer.param_groups[0]["lr"], self.schedule.base_lrs[0]}


@pytest.fixture
def theirs(tmp_path):
    """A directory of the peer's layout, without anything of ours in it."""
    run, path = Run(1.0), tmp_path / "theirs"
    accel_ckpt.save_accelerator_state(
        path,
        [run.accelerator.unwrap_model(run.model).state_dict()],
        [run.optimizer.optimizer],
        [run.schedule.scheduler],
        [],
        0,
        3,
        run.accelerator.scaler,
    )
    accel_ckpt.save_custom_state(run.counter, path)
    again = Run(7.0)
    again.accelerator.load_state(path)
    assert again.values() == {1.0}
    return path


def bombs() -> list[bytes]:
    """The same in the forms in which torch or pickle would have written it."""
    new, old = io.BytesIO(), io.BytesIO()
    torch.save({"state": Bomb()}, new)
    torch.save({"state": Bomb()}, old, _use_new_zipfile_serialization=False)
    return [new.getvalue(), old.getvalue(), pickle.dumps(Bomb()), pickle.dumps(Bomb(), protocol=2)]


def test_no_name_makes_a_pickle_run(theirs, tmp_path):
    """An audit hook hears no unpickler look anything up: beside our files, among the peer's, in place of either."""
    Run(1.0).accelerator.save_state(tmp_path / "ours")

    def load_under_an_audit() -> None:
        warnings.filterwarnings("ignore", message="Detected pickle protocol")  # torch's, of what it then refuses
        reached: list[str] = []
        sys.addaudithook(lambda event, args: event.startswith("pickle") and reached.append(event))
        for number, bomb in enumerate(bombs()):
            ours, foreign = tmp_path / f"ours-{number}", tmp_path / f"theirs-{number}"
            shutil.copytree(tmp_path / "ours", ours)
            for name in LEGACY + UNREAD:
                (ours / name).write_bytes(bomb)
            run = Run(7.0)
            run.accelerator.load_state(ours)
            assert run.values() == {1.0}
            for name in ("model.safetensors", "state.json", "manifest.json"):
                (ours / name).write_bytes(bomb)
                with pytest.raises(CheckpointError):
                    run.accelerator.load_state(ours)
            (ours / "manifest.json").unlink()  # now it is the peer's by the names in it
            with pytest.raises(CheckpointError):
                run.accelerator.load_state(ours)
            for name in LEGACY:
                shutil.copytree(theirs, foreign)
                (foreign / name).write_bytes(bomb)
                run = Run(7.0)
                with pytest.raises(CheckpointCorruptError, match=name.replace(".", r"\.")):
                    run.accelerator.load_state(foreign)
                assert run.values() == {7.0}
                shutil.rmtree(foreign)
            shutil.copytree(theirs, foreign)
            for name in UNREAD:
                (foreign / name).write_bytes(bomb)
            run.accelerator.load_state(foreign)
            assert run.values() == {1.0}
            (foreign / "model.safetensors").unlink()
            with pytest.raises(CheckpointCorruptError, match=r"pytorch_model\.bin"):
                run.accelerator.load_state(foreign)
        assert reached == []
        with pytest.raises(SystemExit):
            pickle.loads(pickle.dumps(Bomb()))
        assert reached, "the audit hears nothing"

    in_child(load_under_an_audit)


def truncate(path) -> None:
    os.truncate(path, path.stat().st_size - 9)


def empty(path) -> None:
    os.truncate(path, 0)


def delete(path) -> None:
    path.unlink()


def rename(path) -> None:
    path.rename(path.with_name("other"))


def fold(path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [truncate, empty, delete, rename, fold])
@pytest.mark.parametrize("name", ["model.safetensors", *(name for name in LEGACY if not name.startswith("random"))])
def test_damage_to_the_peers_files_is_named_and_changes_nothing(theirs, name, damage):
    damage(theirs / name)
    run = Run(7.0)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        run.accelerator.load_state(theirs)
    assert run.values() == {7.0}


@pytest.mark.parametrize("damage", [truncate, empty, fold])
def test_damage_to_the_peers_generators_is_named_and_changes_nothing(theirs, damage):
    damage(theirs / "random_states_0.pkl")
    run = Run(7.0)
    with pytest.raises(CheckpointError, match=r"random_states_0\.pkl"):
        run.accelerator.load_state(theirs)
    assert run.values() == {7.0}
