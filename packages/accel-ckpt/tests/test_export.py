"""Weights and single files for other readers: sizes, names, ties, what stays and what goes, kills at any call."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_ckpt import load, read_weights, save, save_checkpoint, save_model
from accel_state import PartialState
from accel_state.errors import CheckpointError
from accel_testkit.faults import count_calls, failing_at, killed_at


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 32)
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.emb.weight


def net(value: float = 1, layers: int = 3) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(layers)))  # 440 bytes each
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return model


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def values(directory) -> set[float]:
    found: set[float] = set()
    read_weights(directory, lambda name, tensor: found.update(tensor.reshape(-1).tolist()))
    return found


def weights(directory) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    read_weights(directory, lambda name, tensor: found.update({name: tensor.clone()}))
    return found


def test_a_small_model_is_one_file_that_others_read(tmp_path):
    assert save_model(net(2), tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert names(tmp_path / "a" / "b") == ["model.safetensors"]
    state = load_file(tmp_path / "a" / "b" / "model.safetensors")
    assert state.keys() == net().state_dict().keys()
    assert weights(tmp_path / "a" / "b").keys() == state.keys()


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize(("limit", "count"), [("0.5KB", 3), (900, 2), ("1KiB", 2), (399, 4)])
def test_shards_stay_below_the_limit_unless_one_weight_is_larger(tmp_path, limit, count, safe):
    model = net(3)
    save_model(model, tmp_path, limit, safe)
    name = "model.safetensors" if safe else "pytorch_model.bin"
    index = json.loads((tmp_path / f"{name}.index.json").read_text())
    assert index["metadata"]["total_size"] == 3 * 440
    assert set(index["weight_map"]) == set(model.state_dict())
    files = sorted(set(index["weight_map"].values()))
    limit_bytes = {"0.5KB": 500, "1KiB": 1024}.get(limit, limit)
    sizes = []
    for file in files:
        inside = [key for key, other in index["weight_map"].items() if other == file]
        sizes.append(sum(model.state_dict()[key].nbytes for key in inside))
        assert sizes[-1] <= limit_bytes or len(inside) == 1
    stem, suffix = name.split(".")
    assert files == [f"{stem}-{i + 1:05d}-of-{count:05d}.{suffix}" for i in range(count)]
    for key, tensor in weights(tmp_path).items():
        assert torch.equal(tensor, model.state_dict()[key])


@pytest.mark.parametrize("size", ["five", "5XB", 0, -1, 1.5, "0KB", True])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    with pytest.raises(CheckpointError, match="is not a size; give a positive int"):
        save_model(net(), tmp_path / "m", size)
    assert names(tmp_path) == []


@pytest.mark.parametrize("limit", ["10GB", "1KB"])
@pytest.mark.parametrize("safe", [True, False])
def test_tied_weights_are_written_once_and_come_back_as_one(tmp_path, limit, safe):
    model = Tied()
    save_model(model, tmp_path, limit, safe)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size < 2 * model.emb.weight.nbytes
    got: dict[str, torch.Tensor] = {}
    aliases = read_weights(tmp_path, got.__setitem__)
    assert got.keys() == model.state_dict().keys()
    assert got["head.weight"].data_ptr() == got["emb.weight"].data_ptr()
    assert aliases == ({"head.weight": "emb.weight"} if safe else {})


def test_a_view_does_not_bring_its_storage_along(tmp_path):
    model = nn.Linear(10, 1, bias=False)
    model.weight = nn.Parameter(torch.zeros(1000, 10)[:1])
    save_model(model, tmp_path, safe_serialization=False)
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 4000


@pytest.mark.parametrize("first", ["10GB", "0.5KB", 900])
@pytest.mark.parametrize("second", ["10GB", "0.5KB", 900])
def test_an_older_set_goes_and_nothing_else_does(tmp_path, first, second):
    save_model(net(1), tmp_path, first)
    mine = ["config.json", "pytorch_model.bin", "model-00001-of-00009.txt", "my-model-00001-of-00003.safetensors"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    (tmp_path / "model-00001-of-00007.safetensors").write_text("stale")
    save_model(net(2), tmp_path, second)
    count = {"10GB": 1, "0.5KB": 3, 900: 2}[second]
    ours = (
        ["model.safetensors"]
        if count == 1
        else [
            "model.safetensors.index.json",
            *(f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)),
        ]
    )
    assert names(tmp_path) == sorted([*mine, *ours])
    assert values(tmp_path) == {2.0}


def test_without_hard_links_a_set_keeps_its_other_names(tmp_path, monkeypatch):
    def no_links(source, target):
        raise OSError(1, "no links here")

    save_model(net(1), tmp_path, 900)
    monkeypatch.setattr(os, "link", no_links)
    for value in (2, 3):
        save_model(net(value), tmp_path, 900)
        assert values(tmp_path) == {float(value)}
        assert len(names(tmp_path)) == 3


@pytest.mark.parametrize(("first", "second"), [(900, 900), ("10GB", 900), (900, "10GB"), ("10GB", "10GB")])
def test_killed_before_any_call_the_old_or_the_new_weights_are_whole(tmp_path, first, second):
    target = tmp_path / "m"

    def set_up() -> None:
        shutil.rmtree(target, ignore_errors=True)
        save_model(net(1), target, first)
        (target / "config.json").write_text("mine")

    set_up()
    total = len(count_calls(lambda: save_model(net(2), target, second)))
    seen = set()
    for number in range(total):
        set_up()
        assert killed_at(number, lambda: save_model(net(2), target, second))
        (value,) = values(target)
        seen.add(value)
        save_model(net(3), target, second)
        assert values(target) == {3.0}
        assert len(names(target)) == (2 if second == "10GB" else 4)
    assert seen == {1.0, 2.0}


def test_a_checkpoint_is_not_written_into(tmp_path):
    save_checkpoint(tmp_path, {"net": net()})
    with pytest.raises(CheckpointError, match="is a checkpoint, which other weights in it would damage"):
        save_model(net(), tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        save_model(net(), tmp_path / "file")


class Extra(nn.Linear):
    def get_extra_state(self):
        return "words"

    def set_extra_state(self, state):
        self.words = state


@pytest.mark.parametrize("safe", [True, False])
def test_what_is_no_tensor_is_not_dropped(tmp_path, safe):
    with pytest.raises(CheckpointError, match="_extra_state"):
        save_model(Extra(1, 1), tmp_path / "m", safe_serialization=safe)


# ---------------------------------------------------------------- single files


def test_any_object_by_torch_and_tensors_by_safetensors(tmp_path):
    save([1, {"a": torch.ones(2)}], tmp_path / "new" / "list.pt")
    assert load(tmp_path / "new" / "list.pt")[0] == 1
    one = torch.arange(3.0)
    save({"a": one, "b": one, "c": torch.zeros(1)}, tmp_path / "t.safetensors", safe_serialization=True)
    assert load_file(tmp_path / "t.safetensors").keys() == {"a", "c"}
    got: dict[str, torch.Tensor] = {}
    assert read_weights(tmp_path / "t.safetensors", got.__setitem__) == {"b": "a"}
    with pytest.raises(CheckpointError, match="a dict of tensors, not a list"):
        save([1], tmp_path / "x", safe_serialization=True)
    with pytest.raises(CheckpointError, match="is a directory"):
        save([1], tmp_path / "new")
    assert names(tmp_path) == ["new", "t.safetensors"]


def test_a_file_is_replaced_at_one_instant(tmp_path):
    path = tmp_path / "f.pt"
    total = len(count_calls(lambda: save([0], path)))
    seen = []
    for number in range(total):
        save([1], path)
        assert killed_at(number, lambda: save([2], path))
        seen.append(load(path)[0])
        save([3], path)
        assert names(tmp_path) == ["f.pt"]
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}


def test_an_object_that_cannot_be_written_leaves_the_old_file(tmp_path):
    save([1], tmp_path / "f.pt")
    with pytest.raises(CheckpointError, match=r"saving .*f\.pt failed"):
        save(lambda: 1, tmp_path / "f.pt")
    assert load(tmp_path / "f.pt") == [1]
    assert names(tmp_path) == ["f.pt"]


def _both_write(tmp_path):
    PartialState(cpu=True)
    save_model(net(5), tmp_path / "m", 900)
    save([4], tmp_path / "f.pt")
    with pytest.raises(CheckpointError, match=r"rank 0: .* is a directory"):
        save([4], tmp_path / "m")
    return values(tmp_path / "m"), load(tmp_path / "f.pt")


def test_ranks_write_once_and_fail_together(tmp_path, ranks):
    assert ranks(_both_write, 2, tmp_path) == [({5.0}, [4])] * 2


@pytest.mark.parametrize("limit", ["10GB", "0.5KB"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_any_call_can_fail_and_the_old_weights_stay(tmp_path, limit, code):
    target = tmp_path / "m"
    save_model(net(1), target, limit)
    save([1], tmp_path / "f.pt")
    (target / "notes.txt").write_text("mine")
    calls = count_calls(lambda: save_model(net(1), target, limit))
    before_commit = next(number for number, name in enumerate(calls) if name == "replace")
    for number in range(before_commit):
        with failing_at(number, code), pytest.raises(CheckpointError, match=r"the disk is full|read-only"):
            save_model(net(2), target, limit)
        assert values(target) == {1.0}
        assert [name for name in names(target) if name.startswith(".")] == []
        assert (target / "notes.txt").read_text() == "mine"
    for number in range(count_calls(lambda: save([1], tmp_path / "f.pt")).index("replace")):
        with failing_at(number, code), pytest.raises(CheckpointError, match=r"the disk is full|read-only"):
            save([2], tmp_path / "f.pt")
        assert load(tmp_path / "f.pt") == [1]
        assert names(tmp_path) == ["f.pt", "m"]
