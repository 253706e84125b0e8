"""Nodes without a common file system: each has checkpoints of its own, and each of them is whole."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch import nn

from accel_ckpt import (
    Checkpointer,
    latest,
    load,
    load_checkpoint,
    read_weights,
    save,
    save_checkpoint,
    save_in_background,
    save_model,
    verify_checkpoint,
    write_accelerate_files,
)
from accel_state import PartialState, set_seed
from accel_testkit.faults import message_of


def on_nodes(per_node: int) -> tuple[int, int]:
    """Take this rank for one of several nodes of so many ranks each; its number and its node's."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    node = rank // per_node
    os.environ |= {
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(world // per_node),
    }
    PartialState(cpu=True)
    return rank, node


def net_of(value: float) -> nn.Linear:
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, value)
    nn.init.constant_(net.bias, value)
    return net


def save_on_both(directory, blocking):
    rank, node = on_nodes(2)
    set_seed(rank)  # each rank draws numbers of its own
    net = net_of(3)
    target = directory / f"disk-{node}"
    if blocking:
        save_checkpoint(target, {"net": net}, save_on_each_node=True)
    else:
        handle = save_in_background(target, {"net": net}, save_on_each_node=True)
        nn.init.zeros_(net.weight)
        assert handle.wait() == target
        assert handle.done()
    expected = torch.rand(1).item()
    set_seed(99)
    load_checkpoint(target, {"net": net})
    return net.weight.mean().item(), torch.rand(1).item() == expected, expected


@pytest.mark.parametrize("blocking", [True, False])
def test_each_nodes_checkpoint_is_whole(tmp_path, ranks, blocking):
    found = ranks(save_on_both, 4, tmp_path, blocking)
    assert [(weight, same) for weight, same, _ in found] == [(3.0, True)] * 4
    one, two = verify_checkpoint(tmp_path / "disk-0"), verify_checkpoint(tmp_path / "disk-1")
    assert one.files.keys() == two.files.keys()
    assert {f"random_states_{rank}.json" for rank in range(4)} <= one.files.keys()
    for disk in ("disk-0", "disk-1"):  # any of them serves a run elsewhere, generators included
        net = net_of(0)
        load_checkpoint(tmp_path / disk, {"net": net})
        assert net.bias.tolist() == [3.0, 3.0]
        assert torch.rand(1).item() == found[0][2]


def save_with_callbacks(directory):
    _, node = on_nodes(1)

    def before_write(path):
        (path / "mine.txt").write_text(f"of node {node}")
        return {"net": {"weight": torch.full((1,), float(node))}}

    save_checkpoint(
        directory / f"disk-{node}",
        {"net": net_of(1)},
        before_write=before_write,
        before_commit=lambda path: write_accelerate_files(
            path, models=[net_of(4).state_dict()], safe_serialization=False, save_on_each_node=True
        ),
        save_on_each_node=True,
    )


def test_what_callbacks_write_is_in_each_nodes_checkpoint(tmp_path, ranks):
    ranks(save_with_callbacks, 2, tmp_path)
    for node in range(2):
        path = tmp_path / f"disk-{node}"
        manifest = verify_checkpoint(path)
        assert (path / "mine.txt").read_text() == f"of node {node}"
        assert {"mine.txt", "pytorch_model.bin", f"random_states_{node}.pkl"} <= manifest.files.keys()
        assert manifest.objects["net"].tensors.keys() == {"weight"}


def save_to_one_place(directory):
    on_nodes(1)
    return message_of(lambda: save_checkpoint(directory / "c", {"net": net_of(1)}, save_on_each_node=True))


@pytest.mark.parametrize("existing", [True, False])
def test_nodes_that_share_a_directory_are_told(tmp_path, ranks, existing):
    if existing:
        (tmp_path / "c").mkdir()
    one, two = ranks(save_to_one_place, 2, tmp_path)
    assert one == two
    assert "nodes that share a file system need a directory each" in one
    assert [path.name for path in tmp_path.rglob("*")] == (["c"] if existing else [])


def shard(directory, across):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    _, node = on_nodes(2)
    mesh = init_device_mesh("cpu", (2, 2))
    net = nn.Linear(4, 4, bias=False)
    placements = [Shard(0), Replicate()] if across else [Replicate(), Shard(0)]
    net.weight = nn.Parameter(distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, placements))
    return message_of(lambda: save_checkpoint(directory / f"disk-{node}", {"net": net}, save_on_each_node=True))


def test_shards_of_a_node_make_up_its_checkpoint(tmp_path, ranks):
    assert ranks(shard, 4, tmp_path, False) == ["no error"] * 4
    for node in range(2):
        files = verify_checkpoint(tmp_path / f"disk-{node}").files
        assert len([name for name in files if "-shard-" in name]) == 2
        net = nn.Linear(4, 4, bias=False)
        load_checkpoint(tmp_path / f"disk-{node}", {"net": net})
        assert net.weight.tolist() == torch.arange(16.0).reshape(4, 4).tolist()


def test_what_is_sharded_over_nodes_is_refused_on_all(tmp_path, ranks):
    said = ranks(shard, 4, tmp_path, True)
    assert len(set(said)) == 1
    assert "do not make up the whole of shape (4, 4)" in said[0]
    assert "save_on_each_node" in said[0]
    assert list(tmp_path.iterdir()) == []


def keep_and_lose(directory):
    rank, node = on_nodes(1)
    ckpt = Checkpointer(directory / f"disk-{node}", latest(2), save_on_each_node=True)
    net = net_of(0)
    for step in range(4):
        nn.init.constant_(net.weight, step)
        ckpt.save(step, net=net, blocking=step % 2 == 0)
    ckpt.wait()
    names = sorted(path.name for path in ckpt.directory.iterdir())
    if rank == 1:
        (ckpt.directory / "step-3").rename(ckpt.directory / "gone")  # as if its node had been killed before the commit
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = ckpt.restore(net=net)
    warned = [str(warning.message) for warning in caught]
    again = ckpt.save(3, net=net).name
    return names, step, net.weight.mean().item(), again, warned, sorted(path.name for path in ckpt.directory.iterdir())


def test_the_newest_that_every_node_has_is_restored(tmp_path, ranks):
    one, two = ranks(keep_and_lose, 2, tmp_path)
    assert one[:4] == two[:4] == (["step-2", "step-3"], 2, 2.0, "step-3.2")
    assert "not every node has step-3" in one[4][0]
    assert two[4] == []
    assert one[5] == ["step-2", "step-3.2"]  # of each step the last save is kept
    assert two[5] == ["gone", "step-2", "step-3.2"]


def nothing_in_common(directory):
    rank, node = on_nodes(1)
    disk = directory / f"disk-{node}"
    (disk / f"step-{rank}").mkdir(parents=True)
    return message_of(lambda: Checkpointer(disk, save_on_each_node=True).restore(net=net_of(1)))


def test_nothing_that_every_node_has_is_an_error_on_all(tmp_path, ranks):
    one, two = ranks(nothing_in_common, 2, tmp_path)
    assert one.startswith("CheckpointNotFoundError: there is no committed checkpoint")
    assert one.endswith("that every node has.")
    assert "that every node has" in two


def write_weights_and_objects(directory):
    _, node = on_nodes(2)
    disk = directory / f"disk-{node}"
    save_model(net_of(5), disk / "weights", save_on_each_node=True)
    save([node], disk / "object.pt", save_on_each_node=True)
    save_model(net_of(5), directory / "once" / f"{node}")


def test_weights_and_objects_are_written_by_one_process_of_each_node(tmp_path, ranks):
    ranks(write_weights_and_objects, 4, tmp_path)
    for node in range(2):
        seen = {}
        read_weights(tmp_path / f"disk-{node}" / "weights", seen.__setitem__)
        assert seen["weight"].mean() == 5
        assert load(tmp_path / f"disk-{node}" / "object.pt") == [node]
    assert [path.name for path in (tmp_path / "once").iterdir()] == ["0"]
