"""torch.distributed.checkpoint's format: what we write loads there, and what is read there runs no code."""

from __future__ import annotations

import os
import pickle
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from accel_ckpt import convert_to_dcp, merge_fsdp_weights, read_weights, save_checkpoint, save_model
from accel_ckpt.commands import merge_command_parser
from accel_state import PartialState
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    """A tie, a buffer, and sizes that two ranks cannot halve."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.body = nn.Linear(5, 3)
        self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("count", torch.tensor(seed))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x):
        return self.two(self.one(self.body(x)))


def trained(seed: int = 0):
    net = Net(seed)
    opt = torch.optim.AdamW(net.parameters(), lr=0.25)
    net(torch.ones(2, 5)).sum().backward()
    opt.step()
    return net, opt


def equal(found, expected) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def weights_in(path):
    found = {}
    read_weights(path, lambda name, tensor: found.update({name: tensor.clone()}))
    return found


# ---------------------------------------------------------------- writing


def test_torch_loads_what_was_converted(tmp_path):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    net, opt = trained()
    schedule = torch.optim.lr_scheduler.StepLR(opt, 3)
    save_checkpoint(tmp_path / "c", {"net": net, "opt": opt, "schedule": schedule}, step=4)
    assert convert_to_dcp(tmp_path / "c", tmp_path / "dcp") == ["random generators"]
    other, other_opt = trained(seed=1)
    state = {
        "net": other.state_dict(),
        "opt": get_optimizer_state_dict(other, other_opt),
        "schedule": {"last_epoch": -5, "step_size": 0},
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert equal(other.state_dict(), net.state_dict())
    set_optimizer_state_dict(other, other_opt, state["opt"])
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert equal(other_opt.state[theirs], opt.state[mine])
    assert state["schedule"] == {"last_epoch": schedule.last_epoch, "step_size": 3}


def test_a_checkpoint_in_shards_is_converted_whole(tmp_path, ranks):
    ranks(save_sharded, 2, tmp_path / "c", None)
    convert_to_dcp(tmp_path / "c", tmp_path / "dcp")
    state = {"net": Net(seed=1).state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert equal(state["net"], Net().state_dict())


def test_what_cannot_be_converted_leaves_nothing(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "c", {"net": Net()}, rng=False)
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        convert_to_dcp(tmp_path / "c", tmp_path / "there")

    def full_disk(path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("accel_ckpt.dcp.flush_file", full_disk)
    with pytest.raises(CheckpointError, match=r"cannot write .*dcp: the disk is full"):
        convert_to_dcp(tmp_path / "c", tmp_path / "dcp")
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "there"]
    assert convert_to_dcp(tmp_path / "c", tmp_path / "dcp") == []


# ---------------------------------------------------------------- merging


def save_sharded(ours, theirs):
    """A model sharded by fully_shard; as the peer's FSDP writes SHARDED_STATE_DICT, and as we do."""
    PartialState(cpu=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    save_checkpoint(ours, {"net": net})
    if theirs is not None:
        dcp.save({"model": net.state_dict()}, checkpoint_id=theirs)


@pytest.mark.parametrize("safe", [True, False])
def test_a_sharded_models_weights_merge_into_the_whole(tmp_path, ranks, safe):
    ranks(save_sharded, 2, tmp_path / "ours", tmp_path / "pytorch_model_fsdp_0")
    assert len(list((tmp_path / "pytorch_model_fsdp_0").glob("*.distcp"))) == 2
    name = "model.safetensors" if safe else "pytorch_model.bin"
    for source in (tmp_path / "ours", tmp_path / "pytorch_model_fsdp_0"):
        out = tmp_path / f"{source.name}-out"
        assert merge_fsdp_weights(source, out, safe_serialization=safe) == out
        assert [path.name for path in out.iterdir()] == [name]
        found = torch.load(out / name, weights_only=True) if not safe else weights_in(out)
        assert equal({**found, "two.weight": found.get("two.weight", found["one.weight"])}, Net().state_dict())
        assert source.is_dir()


def test_each_model_has_a_file_and_the_source_goes_if_asked(tmp_path):
    save_checkpoint(tmp_path / "c", {"a": Net(1), "opt": trained()[1], "b": Net(2)}, rng=False)
    (tmp_path / "c" / "mine.txt").write_text("x")
    parsed = merge_command_parser().parse_args([str(tmp_path / "c"), str(tmp_path / "out"), "--remove-checkpoint-dir"])
    assert parsed.func(parsed) == 0
    for file, seed in (("model.safetensors", 1), ("model_1.safetensors", 2)):
        net = Net()
        net.load_state_dict(weights_in(tmp_path / "out" / file), strict=False)
        assert equal(net.state_dict(), Net(seed).state_dict())
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["mine.txt"], "only what we wrote is removed"


def test_a_directory_of_dcp_goes_if_asked(tmp_path):
    dcp.save({"model": Net().state_dict(), "optim": {"x": torch.ones(2)}}, checkpoint_id=tmp_path / "d", no_dist=True)
    merge_fsdp_weights(tmp_path / "d", tmp_path / "out", remove_checkpoint_dir=True)
    assert not (tmp_path / "d").exists()
    assert "x" not in weights_in(tmp_path / "out")


def test_places_that_would_lose_something_are_refused(tmp_path):
    save_checkpoint(tmp_path / "c", {"net": Net()})
    save_checkpoint(tmp_path / "other", {"net": Net()})
    save_model(Net(), tmp_path / "weights")
    with pytest.raises(CheckpointError, match="lies in the checkpoint"):
        merge_fsdp_weights(tmp_path / "c", tmp_path / "c" / "out", remove_checkpoint_dir=True)
    with pytest.raises(CheckpointError, match="is a checkpoint"):
        merge_fsdp_weights(tmp_path / "c", tmp_path / "other")
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint with sharded weights"):
        merge_fsdp_weights(tmp_path / "weights", tmp_path / "out")
    save_checkpoint(tmp_path / "empty", {})
    with pytest.raises(CheckpointNotFoundError, match="holds no model's weights"):
        merge_fsdp_weights(tmp_path / "empty", tmp_path / "out", remove_checkpoint_dir=True)
    assert (tmp_path / "empty").is_dir()
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- hostile files


def pickled_call(module: str, name: str) -> bytes:
    """A pickle that calls something, however many dots its name has."""
    strings = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)]
    return b"\x80\x04" + b"".join(strings) + b"\x93)R."


@pytest.mark.parametrize(
    ("module", "name"), [("os", "getpid"), ("torch", "_utils.sys.exit"), ("torch", "load"), ("pathlib", "os.getpid")]
)
def test_metadata_that_names_code_is_refused(tmp_path, module, name):
    (tmp_path / ".metadata").write_bytes(pickled_call(module, name))
    with pytest.raises(CheckpointCorruptError, match=f"names {module}.{name}"):
        merge_fsdp_weights(tmp_path, tmp_path.parent / "out")


def test_damaged_metadata_and_data_are_told(tmp_path):
    source = tmp_path / "d"
    dcp.save({"model": Net().state_dict()}, checkpoint_id=source, no_dist=True)
    whole = (source / ".metadata").read_bytes()
    for data, reason in ((b"", "EOFError"), (whole[:99], "cannot be read"), (pickle.dumps([1]), "it holds a list")):
        (source / ".metadata").write_bytes(data)
        with pytest.raises(CheckpointCorruptError, match=reason):
            merge_fsdp_weights(source, tmp_path / "out")
    (source / ".metadata").write_bytes(whole.replace(b"\x0c__0_0.distcp", b"\x0c../_0.distcp"))
    assert (source / ".metadata").read_bytes() != whole
    with pytest.raises(CheckpointCorruptError, match="out of the directory"):
        merge_fsdp_weights(source, tmp_path / "out")
    (source / ".metadata").write_bytes(whole)
    data = next(source.glob("*.distcp"))
    os.truncate(data, 100)
    with pytest.raises(CheckpointCorruptError, match="cannot be read"):
        merge_fsdp_weights(source, tmp_path / "out")
    data.unlink()
    with pytest.raises(CheckpointCorruptError, match="cannot be read"):
        merge_fsdp_weights(source, tmp_path / "out", remove_checkpoint_dir=True)
    assert source.is_dir()
    assert not (tmp_path / "out").exists()


class Exits:
    def __reduce__(self):
        return sys.exit, (66,)


def test_bytes_beside_the_tensors_are_never_unpickled(tmp_path):
    dcp.save({"model": Net().state_dict(), "extra": Exits()}, checkpoint_id=tmp_path / "d", no_dist=True)
    merge_fsdp_weights(tmp_path / "d", tmp_path / "out")
    assert weights_in(tmp_path / "out").keys() == Net().state_dict().keys()
