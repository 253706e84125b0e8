"""What callers may change about a save or a load while it is under way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_ckpt import Checkpointer, load_checkpoint, save_checkpoint, save_in_background, verify_checkpoint
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError


def run_of(value: float) -> dict:
    """Two models and an optimizer over both, with state."""
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    opt = torch.optim.Adam([*one.parameters(), *two.parameters()])
    with torch.no_grad():
        for p in (*one.parameters(), *two.parameters()):
            p.fill_(value)
            opt.state[p] = {"step": torch.tensor(value), "exp_avg": p + 1, "exp_avg_sq": p + 2}
    return {"one": one, "two": two, "opt": opt}


def values(module: nn.Module) -> set[float]:
    return {number for p in module.parameters() for number in p.reshape(-1).tolist()}


@pytest.mark.parametrize("blocking", [True, False])
def test_a_model_left_out_is_not_written_and_its_optimizer_state_keeps_its_names(tmp_path, blocking):
    def write(path):
        (path / "extra").mkdir()
        (path / "extra" / "one.txt").write_text("mine")
        return {"one": None}

    objects = run_of(1)
    if blocking:
        save_checkpoint(tmp_path / "c", objects, before_write=write)
    else:
        save_in_background(tmp_path / "c", objects, before_write=write).wait()
    manifest = verify_checkpoint(tmp_path / "c")
    assert manifest.objects.keys() == {"two", "opt"}
    assert set(manifest.files) >= {"extra/one.txt", "model_1.safetensors"}
    assert "model.safetensors" not in manifest.files
    assert "one.weight" in manifest.objects["opt"].shapes
    again = run_of(9)
    seen = []

    def leave(path):
        seen.append((path / "extra" / "one.txt").read_text())
        return ["one"]

    load_checkpoint(tmp_path / "c", again, before_load=leave)
    assert seen == ["mine"]
    assert values(again["one"]) == {9.0}
    assert values(again["two"]) == {1.0}
    assert {s["exp_avg"].mean().item() for s in again["opt"].state.values()} == {2.0}
    with pytest.raises(CheckpointMismatchError, match="one: not in the checkpoint"):
        load_checkpoint(tmp_path / "c", again)


def test_weights_given_in_place_of_a_models_own_are_written(tmp_path):
    objects = run_of(1)
    state = {name: torch.full_like(value, 5) for name, value in objects["one"].state_dict().items()}
    save_checkpoint(tmp_path / "c", objects, before_write=lambda path: {"one": state})
    again = run_of(9)
    load_checkpoint(tmp_path / "c", again)
    assert values(again["one"]) == {5.0}
    assert values(again["two"]) == {1.0}


@pytest.mark.parametrize("name", ["opt", "three"])
def test_only_models_can_be_left_out(tmp_path, name):
    with pytest.raises(CheckpointError, match=rf"no models of these names: {name}; there are: one, two"):
        save_checkpoint(tmp_path / "c", run_of(1), before_write=lambda path: {name: None})
    assert list(tmp_path.iterdir()) == []
    save_checkpoint(tmp_path / "c", run_of(1))
    with pytest.raises(CheckpointError, match=rf"no models of these names: {name}"):
        load_checkpoint(tmp_path / "c", run_of(1), before_load=lambda path: [name])


def test_a_callback_that_fails_leaves_the_checkpoint_before(tmp_path):
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, **run_of(1))

    def fail(path):
        (path / "half").write_text("x")
        raise ValueError("no tokenizer")

    with pytest.raises(CheckpointError, match="ValueError: no tokenizer"):
        ckpt.save(2, before_write=fail, **run_of(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    again = run_of(9)
    assert ckpt.restore(before_load=lambda path: ["one", "two"], **again) == 1
    assert values(again["one"]) == {9.0}


def test_a_callback_that_writes_one_of_our_files_is_told(tmp_path):
    with pytest.raises(CheckpointError, match=r"exists.*model\.safetensors"):
        save_checkpoint(
            tmp_path / "c", run_of(1), before_write=lambda path: (path / "model.safetensors").write_text("x") and {}
        )


def test_a_damaged_checkpoint_reaches_no_callback(tmp_path):
    save_checkpoint(tmp_path / "c", run_of(1))
    (tmp_path / "c" / "model.safetensors").write_bytes(b"")
    called = []
    with pytest.raises(CheckpointCorruptError):
        load_checkpoint(tmp_path / "c", run_of(9), before_load=lambda path: called.append(path) or [])
    assert called == []
