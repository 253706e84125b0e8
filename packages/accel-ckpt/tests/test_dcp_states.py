"""Live states in torch's sharded format: whole or not at all, and no code on the way back."""

from __future__ import annotations

import pytest
import torch

from accel_ckpt import load_dcp, load_whole, save, save_dcp
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError


class Bomb:
    def __reduce__(self):
        return print, ("this ran",)


def test_tensors_and_values_come_back_in_place(tmp_path):
    save_dcp({"a": {"x": torch.arange(4.0)}, "groups": [{"lr": 0.1, "params": ["x"]}]}, tmp_path / "s")
    place = torch.zeros(4)
    state = {"a": {"x": place}, "groups": [{"lr": 0.0, "params": ["?"]}]}
    load_dcp(state, tmp_path / "s")
    assert place.tolist() == [0, 1, 2, 3]
    assert state["groups"] == [{"lr": 0.1, "params": ["x"]}]


def test_a_value_that_would_run_code_does_not(tmp_path, capfd):
    save_dcp({"x": torch.ones(2), "groups": Bomb()}, tmp_path / "s")
    with pytest.raises(CheckpointError, match=r"(?s)loading .* failed.*[Ww]eights"):
        load_dcp({"x": torch.zeros(2), "groups": None}, tmp_path / "s")
    assert "this ran" not in capfd.readouterr().out


def test_what_it_lacks_is_an_error(tmp_path):
    save_dcp({"x": torch.ones(2)}, tmp_path / "s")
    with pytest.raises(CheckpointError, match="y"):
        load_dcp({"x": torch.zeros(2), "y": torch.zeros(2)}, tmp_path / "s")


def test_a_failed_save_leaves_the_older_state(tmp_path):
    save_dcp({"x": torch.ones(2)}, tmp_path / "s")
    with pytest.raises(CheckpointError, match="failed"):
        save_dcp({"x": torch.zeros(2), "f": lambda: None}, tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    state = {"x": torch.zeros(2)}
    load_dcp(state, tmp_path / "s")
    assert state["x"].tolist() == [1, 1]


def test_other_files_are_never_removed(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"mine\.txt"):
        save_dcp({"x": torch.ones(2)}, tmp_path / "s")
    assert (tmp_path / "s" / "mine.txt").read_text() == "mine"


def test_a_whole_file_is_read_weights_only(tmp_path, capfd):
    save({"x": torch.ones(2)}, tmp_path / "a.bin")
    assert load_whole(tmp_path / "a.bin")["x"].tolist() == [1, 1]
    torch.save({"x": Bomb()}, tmp_path / "b.bin")
    with pytest.raises(CheckpointCorruptError, match="weights-only"):
        load_whole(tmp_path / "b.bin")
    with pytest.raises(CheckpointNotFoundError):
        load_whole(tmp_path / "c.bin")
    assert "this ran" not in capfd.readouterr().out
