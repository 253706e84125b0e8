"""Files that somebody altered on purpose, checksums included, and links that lead out of a checkpoint."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import xxhash
from safetensors.torch import save_file
from torch import nn

from accel_ckpt import Checkpointer, load_checkpoint, read_weights, remove_checkpoint, save_checkpoint, save_model
from accel_ckpt.durable import MAX_JSON_BYTES, hash_file
from accel_state import PartialState
from accel_state.errors import CheckpointCorruptError, CheckpointError


def net_of(value: float) -> nn.Linear:
    net = nn.Linear(3, 2)
    nn.init.constant_(net.weight, value)
    nn.init.constant_(net.bias, value)
    return net


class Extra:
    """An object with a tensor and a list."""

    def __init__(self) -> None:
        self.state = {"numbers": torch.arange(3), "list": [1, 2]}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        raise AssertionError(f"loaded {state}")


def write_hook_file(path) -> None:
    (path / "sub").mkdir()
    (path / "sub" / "notes.txt").write_text("in the checkpoint")


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "c"
    save_checkpoint(path, {"net": net_of(1), "extra": Extra()}, before_commit=write_hook_file)
    return path


def reseal(path, name: str, content: bytes) -> None:
    """Put a file in the place of another, and its checksum into a manifest that is valid again."""
    (path / name).write_bytes(content)
    body = json.loads((path / "manifest.json").read_bytes())["manifest"]
    entry = hash_file(path / name)
    body["files"][name] = {"size_bytes": entry.size_bytes, "xxh3_128": entry.xxh3_128}
    text = json.dumps(body, separators=(",", ":"))
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    (path / "manifest.json").write_text(f'{{"xxh3_128":"{digest}","manifest":{text}}}')


def refused(path, match: str) -> None:
    """A load is refused and changes nothing."""
    net = net_of(7)
    with pytest.raises(CheckpointCorruptError, match=match):
        load_checkpoint(path, {"net": net, "extra": Extra()})
    assert net.weight.unique().tolist() == net.bias.unique().tolist() == [7.0]


# ---------------------------------------------------------------- altered with their checksums


def header_of(content: bytes) -> dict:
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def with_header(content: bytes, header: dict) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + int.from_bytes(content[:8], "little") :]


@pytest.mark.parametrize(
    "field",
    [
        {"data_offsets": [0, 1 << 50]},
        {"shape": [1 << 61, 2]},
        {"shape": [3, 3]},
        {"dtype": "F64"},
        {"data_offsets": [4, 0]},
    ],
    ids=str,
)
def test_a_safetensors_header_that_lies_is_refused(checkpoint, field):
    content = (checkpoint / "model.safetensors").read_bytes()
    header = header_of(content)
    header["weight"] |= field
    reseal(checkpoint, "model.safetensors", with_header(content, header))
    refused(checkpoint, r"model\.safetensors")


def test_a_header_of_any_claimed_length_is_refused(checkpoint):
    content = (checkpoint / "model.safetensors").read_bytes()
    for length in (0, 1 << 30, 1 << 63, (1 << 64) - 1):
        reseal(checkpoint, "model.safetensors", length.to_bytes(8, "little") + content[8:])
        refused(checkpoint, r"model\.safetensors")


def test_other_tensors_than_the_manifest_lists_are_refused(checkpoint, tmp_path):
    for tensors in ({"weight": torch.ones(2, 3)}, {"weight": torch.ones(2, 3), "bias": torch.ones(3)}, {}):
        save_file(tensors, tmp_path / "other")
        reseal(checkpoint, "model.safetensors", (tmp_path / "other").read_bytes())
        refused(checkpoint, r"model\.safetensors")


STATE = {"net": {"extra": {}, "versions": {}}, "extra": {}}


@pytest.mark.parametrize(
    "text",
    [
        b'{"net":' + b"[" * 50_000 + b"]" * 50_000 + b',"extra":{}}',
        b'{"net":{"extra":{},"versions":{}},"extra":' + b"[" * 600 + b"]" * 600 + b"}",
        b'{"net":{"extra":{},"versions":{}},"extra":' + b"9" * 5000 + b"}",
        b'{"net":{"extra":{},"versions":{}},"extra":1e999}',
        json.dumps({**STATE, "more": {}}).encode(),
        json.dumps({"net": STATE["net"]}).encode(),
        b"[]",
        b"null",
    ],
    ids=["deep", "deeper than any state", "a long number", "infinity", "more", "less", "list", "null"],
)
def test_json_that_is_a_bomb_or_no_state_is_refused(checkpoint, text):
    reseal(checkpoint, "state.json", text)
    refused(checkpoint, r"state\.json|extra")


@pytest.mark.parametrize("file", ["manifest.json", "state.json", "random_states_0.json"])
def test_json_beyond_any_size_is_not_read(checkpoint, file):
    """A file with holes: it takes no room on the disk, and would take 256 MB of memory."""
    with (checkpoint / file).open("r+b") as opened:
        opened.truncate(MAX_JSON_BYTES + 1)
    refused(checkpoint, file.replace(".", r"\."))
    save_model(net_of(1), checkpoint.parent / "w", 10)
    with (checkpoint.parent / "w" / "model.safetensors.index.json").open("r+b") as opened:
        opened.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(CheckpointCorruptError, match="more than a checkpoint's JSON can have"):
        read_weights(checkpoint.parent / "w", lambda name, tensor: None)


# ---------------------------------------------------------------- links


def test_a_link_in_the_place_of_a_folder_is_neither_read_nor_followed_by_removal(checkpoint, tmp_path):
    outside = tmp_path / "outside"
    (checkpoint / "sub").rename(outside)
    (checkpoint / "sub").symlink_to(outside)
    refused(checkpoint, r"sub/notes\.txt is a link out of the checkpoint")
    remove_checkpoint(checkpoint)
    assert (outside / "notes.txt").read_text() == "in the checkpoint"


def test_a_replacement_does_not_follow_a_link_either(checkpoint, tmp_path):
    outside = tmp_path / "outside"
    (checkpoint / "sub").rename(outside)
    (checkpoint / "sub").symlink_to(outside)
    with pytest.raises(CheckpointError, match="sub is a symbolic link where the checkpoint has a directory"):
        save_checkpoint(checkpoint, {"net": net_of(2)}, before_commit=write_hook_file)
    save_checkpoint(checkpoint, {"net": net_of(2)})
    assert (outside / "notes.txt").read_text() == "in the checkpoint"
    net = net_of(7)
    load_checkpoint(checkpoint, {"net": net})
    assert net.weight.unique().tolist() == [2.0]


def test_a_checkpoint_that_is_a_link_is_one(checkpoint, tmp_path):
    """A link to the whole of a checkpoint is the user's way to name it; removing goes through no link."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-5").symlink_to(checkpoint)
    ckpt, net = Checkpointer(tmp_path / "run"), net_of(7)
    assert ckpt.restore(net=net) == 5
    assert net.weight.unique().tolist() == [1.0]


# ---------------------------------------------------------------- shards


def _save_sharded(directory):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    PartialState(cpu=True)
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Linear(4, 4, bias=False)
    net.weight = nn.Parameter(distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0)]))
    save_checkpoint(directory, {"net": net})


def test_damage_to_any_ranks_file_is_found(tmp_path, ranks):
    ranks(_save_sharded, 2, tmp_path / "whole")
    one, two = "model-shard-00000.safetensors", "model-shard-00001.safetensors"

    def refused_after(change, match: str) -> None:
        path = tmp_path / "c"
        shutil.copytree(tmp_path / "whole", path)
        change(path)
        net = nn.Linear(4, 4, bias=False)
        nn.init.zeros_(net.weight)
        with pytest.raises(CheckpointCorruptError, match=match):
            load_checkpoint(path, {"net": net})
        assert net.weight.unique().tolist() == [0.0]
        shutil.rmtree(path)

    def exchange(path) -> None:
        (path / one).rename(path / "x")
        (path / two).rename(path / one)
        (path / "x").rename(path / two)

    refused_after(exchange, f"{one} was altered.*{two} was altered")
    refused_after(lambda path: shutil.copy(path / one, path / two), f"{two} was altered")
    refused_after(lambda path: (path / two).unlink(), f"{two} is missing")
    refused_after(lambda path: (path / two).write_bytes(b""), f"{two} has 0 bytes")
    refused_after(lambda path: (path / "random_states_1.json").unlink(), r"random_states_1\.json is missing")
