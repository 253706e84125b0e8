"""Models of which each rank holds a part, by name: one checkpoint of the whole, read whole or in other parts."""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict

import pytest
import torch
from torch import nn

from accel_ckpt import load_checkpoint, save_checkpoint, save_in_background, save_model, verify_checkpoint
from accel_ckpt.objects import Captured
from accel_ckpt.parts import parts_of, put_together
from accel_state import PartialState
from accel_state.errors import CheckpointError, CheckpointMismatchError
from accel_state.protocols import Parted

LAYERS = 3


def whole_net(fill: float = 0.0) -> nn.Sequential:
    """Layers with a tie inside the second, a buffer and a module with extra state."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)) for _ in range(LAYERS)))
    net[1][2].weight = net[1][0].weight
    net[2].append(Remembering())
    with torch.no_grad():
        for number, tensor in enumerate(net.parameters(), 1):
            tensor.fill_(fill * number)
    return net


class Remembering(nn.Module):
    what = "nothing"

    def get_extra_state(self):
        return {"what": self.what}

    def set_extra_state(self, state):
        self.what = state["what"]


class Piece(nn.Module):
    """Some layers of the whole net, by their names there."""

    def __init__(self, net: nn.Sequential, wanted: range) -> None:
        super().__init__()
        self.state_names = tuple(net.state_dict())
        self.model_class = type(net)
        for index in wanted:
            self.add_module(str(index), net[index])

    def load_state_dict(self, state_dict, strict=True, assign=False):
        assert not set(state_dict) - set(self.state_dict())
        return super().load_state_dict(state_dict, strict, assign)


def objects_of(wanted: range | None, fill: float):
    """The net or a piece of it with its optimizer of two groups; trained if it is filled."""
    net = whole_net(fill)
    net[2][3].what = "something" if fill else "nothing"
    model = net if wanted is None else Piece(net, wanted)
    assert isinstance(model, Parted) == (wanted is not None)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    groups = [{"params": matrices, "lr": fill}, {"params": [p for p in model.parameters() if p.dim() == 1]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    if fill:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    return {"net": model, "opt": optimizer}


def contents(objects) -> dict:
    net, optimizer = objects["net"], objects["opt"]
    found = {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in net.state_dict().items()}
    for name, p in net.named_parameters():
        found |= {f"{name}/{key}": value.tolist() for key, value in optimizer.state[p].items()}
    return {**found, "lr": optimizer.param_groups[0]["lr"]}


def pieces(world: int, rank: int) -> range | None:
    if world == 1:
        return None
    return range(rank, LAYERS, world) if world < LAYERS else range(rank, rank + 1)


def save(directory, blocking=True, **options):
    state = PartialState(cpu=True)
    objects = objects_of(pieces(state.num_processes, state.process_index), 1.0)
    held = contents(objects)
    if blocking:
        save_checkpoint(directory, objects, **options)
    else:
        handle = save_in_background(directory, objects, **options)
        with torch.no_grad():
            for p in objects["net"].parameters():
                p.zero_()
        handle.wait()
    return held


def load(directory):
    state = PartialState(cpu=True)
    objects = objects_of(pieces(state.num_processes, state.process_index), 0.0)
    load_checkpoint(directory, objects)
    return contents(objects)


@pytest.mark.parametrize(("world", "others", "blocking"), [(1, (2, 3), True), (2, (3, 1), False), (3, (1, 2), True)])
def test_any_parts_read_what_any_others_wrote(tmp_path, ranks, world, others, blocking):
    wrote = {name: value for held in ranks(save, world, tmp_path / "c", blocking) for name, value in held.items()}
    manifest = verify_checkpoint(tmp_path / "c")
    net = manifest.objects["net"]
    assert net.type == "Sequential"
    assert net.aliases == {"1.2.weight": "1.0.weight"}
    assert [*net.tensors] == [
        name for name in whole_net().state_dict() if name not in (*net.aliases, "2.3._extra_state")
    ]
    for other in others:
        read = ranks(load, other, tmp_path / "c")
        assert {name: value for held in read for name, value in held.items()} == wrote


def wrong_on_the_second(directory, strict):
    import warnings

    state = PartialState(cpu=True)
    objects = objects_of(pieces(2, state.process_index), 0.0)
    if state.process_index == 1:
        objects["net"].register_module("1", nn.Sequential(nn.Linear(4, 5)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = load_checkpoint(directory, objects, strict=strict)
    return found.differences


def test_every_rank_hears_of_what_does_not_fit_on_another(tmp_path, ranks):
    ranks(save, 1, tmp_path / "c")
    first, second = ranks(wrong_on_the_second, 2, tmp_path / "c", False)
    assert first == second
    assert "net.1.0.bias: shape (4,) in the checkpoint, (5,) here" in first
    with pytest.raises(Exception, match=r"CheckpointMismatchError: .*rank 1: .*net\.1\.0\.bias: shape"):
        ranks(wrong_on_the_second, 2, tmp_path / "c", True)


def test_names_that_no_part_knows_are_told():
    objects = {"net": Piece(whole_net(1.0), range(1))}
    objects["net"].state_names = tuple(objects["net"].state_dict())
    whole = {"net": whole_net(1.0)}
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(f"{folder}/c", whole)
        with pytest.raises(CheckpointMismatchError, match=r"net\.1\.0\.weight: only in the checkpoint"):
            load_checkpoint(f"{folder}/c", objects)


def popped_on_one(directory):
    state = PartialState(cpu=True)
    objects = objects_of(pieces(2, state.process_index), 1.0)
    answer = {"net": None} if state.process_index else {}
    try:
        save_checkpoint(directory, objects, before_write=lambda _path: answer)
    except CheckpointError as error:
        return str(error)


def test_a_part_left_out_by_one_rank_fails_the_save_on_all(tmp_path, ranks):
    for said in ranks(popped_on_one, 2, tmp_path / "c"):
        assert said == "net is left out by rank 1 alone: all ranks save their parts of it, or none does"
    assert list(tmp_path.iterdir()) == []


def replaced(directory):
    state = PartialState(cpu=True)
    objects = objects_of(pieces(2, state.process_index), 1.0)
    other = {name: value * 3 for name, value in objects["net"].state_dict().items() if isinstance(value, torch.Tensor)}
    save_checkpoint(directory, objects, before_write=lambda _path: {"net": other})


def test_weights_in_place_of_the_parts_own_are_written(tmp_path, ranks):
    ranks(replaced, 2, tmp_path / "c")
    model = whole_net()
    with pytest.warns(RuntimeWarning, match="does not fit wholly"):
        loaded = load_checkpoint(tmp_path / "c", {"net": model}, strict=False)
    assert loaded.differences == ("net.2.3._extra_state: missing in the checkpoint",)
    assert torch.equal(model[0][1].running_var, torch.full((4,), 3.0))


def save_on_nodes(directory, within):
    """Two nodes of two ranks, with pipelines of two stages within nodes or across them."""
    rank = int(os.environ["RANK"])
    node, local = divmod(rank, 2)
    os.environ |= {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"GROUP_RANK": str(node), "GROUP_WORLD_SIZE": "2"}
    PartialState(cpu=True)
    stage = local if within else node
    try:
        save_checkpoint(directory / f"disk-{node}", objects_of(pieces(2, stage), 1.0), save_on_each_node=True)
    except CheckpointError as error:
        return str(error)


def test_each_node_has_all_parts_or_none_saves(tmp_path, ranks):
    assert ranks(save_on_nodes, 4, tmp_path, True) == [None] * 4
    whole = contents(objects_of(None, 1.0))
    for node in (0, 1):
        objects = objects_of(None, 0.0)
        load_checkpoint(tmp_path / f"disk-{node}", objects)
        assert contents(objects) == whole
        shutil.rmtree(tmp_path / f"disk-{node}")
    for said in ranks(save_on_nodes, 4, tmp_path, False):
        assert said.startswith("net: no rank has 1.0.weight, 1.0.bias")
        assert "keep pipelines within nodes" in said
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- putting together, without processes


def part(*names: str, whole=("a", "b"), **more) -> dict[str, Captured]:
    tree = {"extra": {}, "versions": {}}
    bulk = more.pop("bulk", {name: torch.ones(2) for name in names})
    return {"net": Captured(kind="model", type="Net", tree=tree, bulk=bulk, whole=whole, **more)}


def optimizer(*groups: list[str]) -> dict[str, Captured]:
    tree = {
        "state": {name: {"n": name} for group in groups for name in group},
        "groups": [{"lr": 1, "params": group} for group in groups],
        "rest": {},
    }
    return {"opt": Captured(kind="optimizer", type="SGD", tree=tree, whole=("net.a", "net.b", "net.c"))}


def join(*objects: dict[str, Captured]):
    return put_together(objects[0], {rank: parts_of(captured) for rank, captured in enumerate(objects)})


def test_groups_are_joined_in_the_models_order():
    (joined,) = join(optimizer(["net.c"], []), optimizer(["net.a"], ["net.b"])).values()
    assert [group["params"] for group in joined.tree["groups"]] == [["net.a", "net.c"], ["net.b"]]
    assert joined.tree["state"].keys() == {"net.a", "net.b", "net.c"}


@pytest.mark.parametrize(
    ("objects", "reason"),
    [
        ((part("a"), part("a")), "net: no rank has b"),
        (
            (part("a"), part("b", bulk={"a": torch.ones(3), "b": torch.ones(1)})),
            r"net: a is .* on one rank, .* on another",
        ),
        ((part("a"), part("b", aliases={"a": "b"})), "net: a: tied to another weight on one rank, and not on another"),
        ((optimizer(["net.a"]), optimizer(["net.b"], [])), r"optimizers of 1, 2 groups"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(objects, reason):
    with pytest.raises(CheckpointError, match=reason):
        join(*objects)


def test_weights_in_parts_are_not_written_as_the_whole(tmp_path):
    piece = Piece(whole_net(1.0), range(2))
    with pytest.raises(CheckpointError, match=r"only a part of the weights \(as of 2\.0\.weight"):
        save_model(piece, tmp_path / "m")
    with pytest.raises(CheckpointError, match="only a part of the weights:"):
        save_model(nn.Linear(1, 1), tmp_path / "m", weights={})
    weights = OrderedDict((n, v) for n, v in whole_net(1.0).state_dict().items() if n != "2.3._extra_state")
    piece.state_names = tuple(weights)
    save_model(piece, tmp_path / "m", weights=weights)
