"""Tensors in pieces on several ranks: each writes its own, and any placement reads what any other wrote."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_ckpt import load_checkpoint, save_checkpoint, save_in_background, verify_checkpoint
from accel_ckpt.boxes import Box, overlap, whole_box
from accel_ckpt.layout import assign
from accel_ckpt.manifest import read_manifest
from accel_ckpt.objects import Captured
from accel_state import PartialState
from accel_state.errors import CheckpointCorruptError, CheckpointError

SHAPES = {"weight": (5, 6), "narrow": (1, 3), "bias": (7,), "scale": ()}


def values(name: str) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.arange(1.0, math.prod(shape) + 1).reshape(shape) + 100 * len(name)


class Net(nn.Module):
    """Parameters of awkward sizes, a tie, and a buffer."""

    def __init__(self, fill: bool) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(values(name) if fill else torch.full(shape, -1.0)))
        self.tied = self.weight
        self.register_buffer("count", torch.tensor(7 if fill else 0))


class Moments:
    """An optimizer by shape, whose state lies as its parameters do; without one until its first step, as torch's."""

    def __init__(self, parameters, fill: bool) -> None:
        self.param_groups = [{"params": list(parameters), "lr": 0.5}]
        self.state = {}
        if fill:
            self.state = {
                p: {"step": torch.tensor(3.0), "avg": (p * 2).detach()} for p in self.param_groups[0]["params"]
            }

    def state_dict(self):
        (group,) = self.param_groups
        numbers = {p: i for i, p in enumerate(group["params"])}
        return {
            "state": {numbers[p]: dict(fields) for p, fields in self.state.items()},
            "param_groups": [{**group, "params": list(numbers.values())}],
        }

    def load_state_dict(self, state):
        (group,) = self.param_groups
        self.state = {group["params"][number]: fields for number, fields in state["state"].items()}


def place(net: nn.Module, how: str) -> nn.Module:
    """Distribute a net's parameters by hand; `narrow` stays plain, as what no plan names does."""
    if how == "plain":
        return net
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    world = torch.distributed.get_world_size()
    if how == "grid":
        mesh, placements = (
            init_device_mesh("cpu", (2, world // 2)),
            {2: [Shard(1), Shard(0)], 1: [Replicate(), Shard(0)]},
        )
    else:
        mesh = init_device_mesh("cpu", (world,))
        dim = {"rows": 0, "columns": 1}.get(how)
        placements = {2: [Shard(dim)] if dim is not None else [Replicate()], 1: [Shard(0)]}
    for name, p in list(net.named_parameters()):
        if name != "narrow":
            setattr(
                net,
                name,
                nn.Parameter(distribute_tensor(p.data, mesh, placements.get(p.dim(), [Replicate()] * mesh.ndim))),
            )
    net.tied = net.weight
    return net


def make(how: str, fill: bool):
    net = place(Net(fill), how)
    return {"net": net, "opt": Moments(net.parameters(), fill)}


def full(tensor: torch.Tensor) -> list:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).tolist()


def state_of(objects) -> dict:
    """Every value of the run; the whole of sharded tensors."""
    net, opt = objects["net"], objects["opt"]
    found = {name: full(p.detach()) for name, p in net.named_parameters()} | {"count": net.count.item()}
    for name, p in net.named_parameters():
        fields = opt.state[p]
        assert type(fields["avg"]) is type(p.data)
        assert getattr(fields["avg"], "placements", None) == getattr(p, "placements", None)
        found[f"{name}.avg"], found[f"{name}.step"] = full(fields["avg"]), fields["step"].item()
    assert net.tied is net.weight
    return found


def save(directory, how, blocking):
    PartialState(cpu=True)
    objects = make(how, fill=True)
    if blocking:
        save_checkpoint(directory, objects)
        return
    handle = save_in_background(directory, objects)
    for p in objects["net"].parameters():
        with torch.no_grad():
            p.zero_()
    handle.wait()
    assert handle.done()


def load(directory, how, filled):
    PartialState(cpu=True)
    objects = make(how, fill=False)
    if filled:
        objects["opt"] = Moments(objects["net"].parameters(), fill=True)
    load_checkpoint(directory, objects)
    return state_of(objects)


WAYS = [(1, "plain"), (2, "rows"), (2, "columns"), (3, "rows"), (3, "copies"), (4, "grid")]


@pytest.mark.parametrize(("world", "how"), WAYS, ids=str)
def test_any_placement_reads_what_any_other_wrote(tmp_path, ranks, world, how):
    """Two others of each in the core tier, all under --faults."""
    ranks(save, world, tmp_path / "c", how, world != 3)
    manifest = verify_checkpoint(tmp_path / "c")
    weight = manifest.objects["net"].tensors["weight"]
    assert weight.shape == (5, 6)
    assert len(weight.pieces) == {"plain": 1, "copies": 1, "grid": 4}.get(how, world)
    expected = state_of(make("plain", fill=True))
    number = WAYS.index((world, how))
    others = WAYS if "ACCEL_TEST_FAULTS" in os.environ else [WAYS[(number + step) % len(WAYS)] for step in (1, 3)]
    for filled, (other_world, other) in zip(itertools.cycle([False, True]), others, strict=False):
        for found in ranks(load, other_world, tmp_path / "c", other, filled):
            assert found == expected


def count_written(directory):
    PartialState(cpu=True)
    save_checkpoint(directory, make("copies", fill=True))


def test_copies_are_written_once_by_ranks_that_share_the_work(tmp_path, ranks):
    ranks(count_written, 2, tmp_path / "c")
    manifest = read_manifest(tmp_path / "c" / "manifest.json")
    files = [piece.file for o in manifest.objects.values() for t in o.tensors.values() for piece in t.pieces]
    sizes = [sum(f.endswith(f"-shard-0000{rank}.safetensors") for f in files) for rank in (0, 1)]
    assert sum(sizes) == len(files)
    assert min(sizes) >= 3


def elements_read(directory):
    """How many elements of the files a rank copies, and how many it holds."""
    PartialState(cpu=True)
    from accel_ckpt.stored import Stored

    read = []
    original = Stored._copy

    def copy(self, target, wanted):
        read.append(sum(c.numel for box, _ in self.pieces if (c := wanted.common(box))))
        original(self, target, wanted)

    Stored._copy = copy
    objects = make("rows", fill=False)
    load_checkpoint(directory, objects)
    held = sum(p.to_local().numel() for name, p in objects["net"].named_parameters() if name != "narrow")
    return sum(read), 2 * held  # weights and averages


def test_a_rank_reads_only_what_it_holds(tmp_path, ranks):
    ranks(save, 2, tmp_path / "c", "columns", True)
    for read, held in ranks(elements_read, 3, tmp_path / "c"):
        assert 0 < read <= held


def die_while_writing(directory):
    state = PartialState(cpu=True)
    import accel_ckpt.saving as module

    objects = make("rows", fill=True)
    if state.process_index == 1:
        module.write_tensor_files = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    handle = save_in_background(directory, objects)
    handle._thread.join()
    Path(f"{directory}.said").write_text(str(handle._failure[0]))


def test_a_rank_that_dies_in_the_background_fails_the_save(tmp_path, ranks):
    with pytest.raises(Exception, match=r"rank 1|signal|SIGKILL|killed"):
        ranks(die_while_writing, 2, tmp_path / "c")
    said = tmp_path / "c.said"
    assert not (tmp_path / "c").exists()
    if said.exists():  # the pool may have ended rank 0 before
        assert "rank 1 ended before it had written its part" in said.read_text()


def fail_in_the_background(directory):
    state = PartialState(cpu=True)
    import accel_ckpt.saving as module

    def full_disk(*args):
        raise OSError(28, "No space left on device", "file")

    if state.process_index == 1:
        module.write_tensor_files = full_disk
    handle = save_in_background(directory, make("rows", fill=True))
    try:
        handle.wait()
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_a_rank_that_fails_in_the_background_fails_the_save_on_all(tmp_path, ranks):
    for said in ranks(fail_in_the_background, 2, tmp_path / "c"):
        assert "rank 1: the disk is full" in said
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- dealing, without processes


def captured(**tensors):
    return {"net": Captured(kind="model", type="Net", tree={}, bulk=tensors)}


def test_parts_that_do_not_make_up_the_whole_are_refused(tmp_path):
    files = {"net": "model.safetensors"}
    half, other = Box((0, 0), (2, 4)), Box((2, 0), (2, 4))
    objects = captured(w=torch.zeros(4, 4))

    def dealt(*layouts):
        return assign(objects, files, dict(enumerate(layouts)), main=0)

    assert len(dealt({"net": {"w": half}}, {"net": {"w": other}}).entries["net"]["w"].pieces) == 2
    for second in (half, Box((2, 0), (1, 4)), Box((1, 0), (2, 4))):
        with pytest.raises(CheckpointError, match="do not make up the whole of shape"):
            dealt({"net": {"w": half}}, {"net": {"w": second}})
    with pytest.raises(CheckpointError, match="rank 1 holds other sharded tensors than rank 0; they differ in net: w"):
        dealt({"net": {"w": half}}, {})


def test_overlaps_are_found_along_any_dim():
    assert not overlap([Box((0, 0), (2, 2)), Box((0, 2), (2, 2)), Box((2, 0), (1, 4))])
    assert overlap([Box((0, 0), (2, 3)), Box((0, 2), (2, 2))])
    assert overlap([Box((0, 1), (2, 1)), whole_box((2, 2))])
    assert overlap([whole_box(()), whole_box(())])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda pieces: pieces.pop(), "do not make up"),
        (lambda pieces: pieces[0][1].__setitem__(0, 9), "reaches out"),
        (lambda pieces: pieces.__setitem__(1, pieces[0]), "do not make up|overlap"),
        (lambda pieces: pieces[0].__setitem__(0, "../x"), "not among the files"),
        (lambda pieces: pieces[0].__setitem__(1, [0]), "other dims"),
    ],
)
def test_manifests_that_lie_about_pieces_are_refused(tmp_path, ranks, change, reason):
    ranks(save, 2, tmp_path / "c", "rows", True)
    path = tmp_path / "c" / "manifest.json"
    body = json.loads(path.read_text())["manifest"]
    change(body["objects"]["net"]["tensors"]["weight"]["pieces"])
    import xxhash

    text = json.dumps(body, separators=(",", ":"))
    path.write_text(f'{{"xxh3_128":"{xxhash.xxh3_128_hexdigest(text.encode())}","manifest":{text}}}')
    with pytest.raises(CheckpointCorruptError, match=reason):
        read_manifest(path)
