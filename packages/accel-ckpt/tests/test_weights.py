"""Reading weights of any origin: what is found, what is damaged, what is hostile."""

from __future__ import annotations

import json
import pickle
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_ckpt import (
    clean_state_dict_for_safetensors,
    load,
    load_custom_state,
    load_state_dict,
    read_weights,
    save_custom_state,
    save_model,
)
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError


def names_of(path) -> list[str]:
    found: list[str] = []
    read_weights(path, lambda name, tensor: found.append(name))
    return sorted(found)


def test_files_indexes_and_directories_of_others(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "adapter.bin")
    assert names_of(tmp_path) == names_of(tmp_path / "adapter.bin") == ["a"]
    save_file({"b": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"Found: adapter\.bin, other\.safetensors"):
        names_of(tmp_path)
    index = {"weight_map": {"b": "other.safetensors", "a": "adapter.bin"}}
    (tmp_path / "mixed.index.json").write_text(json.dumps(index))
    assert names_of(tmp_path) == names_of(tmp_path / "mixed.index.json") == ["a", "b"]
    with pytest.raises(CheckpointNotFoundError, match="there is no"):
        names_of(tmp_path / "nothing")


def sharded(path) -> None:
    save_model(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), path, 500)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "no weight_map"),
        ('{"weight_map": {"a": 3}}', "no weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "not allowed"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not allowed"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "is missing, though"),
        ('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "lacks a, which should be in it"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_an_index_that_lies_is_named(tmp_path, text, reason):
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointCorruptError, match=reason):
        names_of(tmp_path)


@pytest.mark.parametrize("name", ["w.safetensors", "w.bin"])
@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\xff" * 100, b"x" * 50, b"PK\x03\x04" + b"x" * 50])
def test_damaged_files_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match=name.replace(".", r"\.")):
        names_of(tmp_path)


class Bomb:
    def __reduce__(self):
        return sys.exit, (66,)


def test_a_pickle_that_runs_code_is_refused_unless_asked_for(tmp_path):
    torch.save({"a": Bomb()}, tmp_path / "w.bin")
    for read in (names_of, load, load_state_dict):
        with pytest.raises(CheckpointCorruptError, match=r"weights-only.*pass weights_only=False"):
            read(tmp_path / "w.bin")
    with pytest.raises(SystemExit):
        load(tmp_path / "w.bin", weights_only=False)
    (tmp_path / "w.bin").write_bytes(pickle.dumps(Bomb(), protocol=2))
    with pytest.raises(CheckpointCorruptError):
        load(tmp_path / "w.bin")
    torch.save([1], tmp_path / "w.bin")
    with pytest.raises(CheckpointCorruptError, match="not hold a dict of tensors, but a list"):
        names_of(tmp_path / "w.bin")


def test_a_state_dict_goes_where_its_map_says(tmp_path):
    save_file({"a.w": torch.ones(1), "ab.w": torch.ones(1)}, tmp_path / "w.safetensors")
    assert {t.device.type for t in load_state_dict(tmp_path / "w.safetensors").values()} == {"cpu"}
    placed = load_state_dict(tmp_path / "w.safetensors", {"": "cpu", "a": "meta"})
    assert {name: t.device.type for name, t in placed.items()} == {"a.w": "meta", "ab.w": "cpu"}
    assert load_state_dict(tmp_path / "w.safetensors", {"a": "disk"})["a.w"].device.type == "cpu"
    with pytest.raises(CheckpointNotFoundError):
        load_state_dict(tmp_path)


def test_a_state_dict_is_cleaned_for_safetensors(tmp_path):
    one = torch.arange(6.0).reshape(2, 3)
    clean = clean_state_dict_for_safetensors({"a": one, "b": one, "c": one.T})
    assert clean.keys() == {"a", "c"}
    assert all(tensor.is_contiguous() for tensor in clean.values())
    with pytest.raises(CheckpointError, match="n is a int"):
        clean_state_dict_for_safetensors({"n": 1})


class Counter:
    n = 0

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


def test_single_objects_come_back_by_number(tmp_path):
    for index in range(2):
        counter = Counter()
        counter.n = index + 3
        save_custom_state(counter, tmp_path, index)
    again = Counter()
    load_custom_state(again, tmp_path, 1)
    assert again.n == 4
    with pytest.raises(CheckpointNotFoundError, match=r"custom_checkpoint_5\.pkl"):
        load_custom_state(again, tmp_path, 5)
