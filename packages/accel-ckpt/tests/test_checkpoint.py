"""Saving and loading one checkpoint in one process: what comes back, what is refused, what stays."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_ckpt import load_checkpoint, save_checkpoint, verify_checkpoint
from accel_state import set_seed
from accel_state.errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.emb.weight


class WithExtra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.note = {"tokens": 0, "mean": torch.zeros(2)}

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


class Counter:
    def __init__(self, n: int = 0) -> None:
        self.n = n

    def state_dict(self):
        return {"n": self.n, "seen": torch.full((2,), self.n), ("odd", 1): [None, float("inf")]}

    def load_state_dict(self, state):
        assert state[("odd", 1)] == [None, float("inf")]
        assert state["seen"].tolist() == [state["n"]] * 2
        self.n = state["n"]


class Meter(Counter):
    pass


def trained(seed: int = 0, steps: int = 3):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    opt = torch.optim.AdamW(net.parameters(), lr=0.05)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20)
    for _ in range(steps):
        step(net, opt, sched)
    return net, opt, sched


def step(net, opt, sched) -> None:
    net(torch.randn(5, 3)).pow(2).sum().backward()
    opt.step()
    sched.step()
    opt.zero_grad()


def draws() -> list[float]:
    return [random.random(), np.random.random(), torch.rand(1).item()]  # noqa: NPY002 - the global one is what we mean


def weights(net) -> list:
    return [value.tolist() for value in net.state_dict().values()]


def test_a_run_goes_on_bit_for_bit(tmp_path):
    net, opt, sched = trained()
    save_checkpoint(tmp_path / "c", {"net": net, "opt": opt, "sched": sched}, step=3, metadata={"epoch": 1})
    for _ in range(4):
        step(net, opt, sched)
    want = weights(net), opt.param_groups[0]["lr"], torch.rand(3).tolist()

    net, opt, sched = trained(seed=9, steps=0)
    before = [id(p) for p in net.parameters()]
    loaded = load_checkpoint(tmp_path / "c", {"net": net, "opt": opt, "sched": sched})
    assert (loaded.step, loaded.metadata, loaded.world_size) == (3, {"epoch": 1}, 1)
    assert (loaded.differences, loaded.unread) == ((), ())
    assert [id(p) for p in net.parameters()] == before
    for _ in range(4):
        step(net, opt, sched)
    assert (weights(net), opt.param_groups[0]["lr"], torch.rand(3).tolist()) == want


def test_generators_of_all_libraries_come_back(tmp_path):
    set_seed(5)
    save_checkpoint(tmp_path / "c", {"counter": Counter()})
    want = draws()
    load_checkpoint(tmp_path / "c", {})
    assert draws() == want


def test_no_generators_saved_is_said(tmp_path):
    save_checkpoint(tmp_path / "c", {}, rng=False)
    with pytest.warns(RuntimeWarning, match="rng=False: the random generators of rank 0 go on"):
        load_checkpoint(tmp_path / "c", {})
    load_checkpoint(tmp_path / "c", {}, rng=False)


def test_the_files_are_open_to_others(tmp_path):
    net, opt, sched = trained()
    other = Counter(2)
    save_checkpoint(tmp_path / "c", {"net": net, "second": nn.Linear(1, 1), "opt": opt, "sched": sched, "n": other})
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "model_1.safetensors",
        "optimizer.safetensors",
        "random_states_0.json",
        "state.json",
        "state.safetensors",
    ]
    assert load_file(tmp_path / "c" / "model.safetensors").keys() == net.state_dict().keys()
    keys = load_file(tmp_path / "c" / "optimizer.safetensors").keys()
    assert {"net.0.weight/exp_avg", "net.3.bias/step"} <= keys
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())["manifest"]
    assert manifest["objects"]["net"]["tensors"]["0.weight"] == {
        "file": "model.safetensors",
        "dtype": "float32",
        "shape": [4, 3],
    }
    assert manifest["versions"]["torch"] == torch.__version__


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    net = Tied()
    want = net.emb.weight.tolist()
    save_checkpoint(tmp_path / "c", {"net": net})
    assert list(load_file(tmp_path / "c" / "model.safetensors")) == ["emb.weight"]
    assert verify_checkpoint(tmp_path / "c").objects["net"].aliases == {"head.weight": "emb.weight"}
    nn.init.zeros_(net.emb.weight)
    load_checkpoint(tmp_path / "c", {"net": net})
    assert net.head.weight is net.emb.weight
    assert net.emb.weight.tolist() == want

    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(4, 3))
    load_checkpoint(tmp_path / "c", {"net": untied})
    assert untied.head.weight.tolist() == untied.emb.weight.tolist() == want


def test_a_tie_that_the_checkpoint_contradicts_is_an_error(tmp_path):
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(4, 3))
    save_checkpoint(tmp_path / "c", {"net": untied})
    with pytest.raises(CheckpointMismatchError, match=r"net\.head\.weight: tied to emb\.weight here, another weight"):
        load_checkpoint(tmp_path / "c", {"net": Tied()})


def test_extra_state_and_module_versions_come_back(tmp_path):
    net = WithExtra()
    net.note = {"tokens": 7, "mean": torch.ones(2)}
    save_checkpoint(tmp_path / "c", {"net": net})
    fresh = WithExtra()
    load_checkpoint(tmp_path / "c", {"net": fresh})
    assert (fresh.note["tokens"], fresh.note["mean"].tolist()) == (7, [1, 1])
    with pytest.raises(CheckpointMismatchError, match=r"net\._extra_state: only in the checkpoint"):
        load_checkpoint(tmp_path / "c", {"net": nn.ModuleDict({"lin": nn.Linear(2, 2)})})


def test_wrappers_do_not_change_names(tmp_path):
    net, opt, sched = trained()
    save_checkpoint(tmp_path / "c", {"net": nn.DataParallel(net), "opt": opt, "sched": sched})
    assert load_file(tmp_path / "c" / "model.safetensors").keys() == net.state_dict().keys()
    fresh, fresh_opt, fresh_sched = trained(seed=3, steps=0)
    compiled = torch.compile(fresh, backend="eager")
    load_checkpoint(tmp_path / "c", {"net": compiled, "opt": fresh_opt, "sched": fresh_sched})
    assert weights(fresh) == weights(net)


def test_a_model_that_holds_a_scheduler_is_still_the_model(tmp_path):
    net, _, sched = trained()
    net.scheduler = sched
    save_checkpoint(tmp_path / "c", {"net": net})
    assert verify_checkpoint(tmp_path / "c").objects["net"].type == "Sequential"
    assert load_file(tmp_path / "c" / "model.safetensors").keys() == net.state_dict().keys()


def test_another_number_type_is_converted_with_a_warning(tmp_path):
    save_checkpoint(tmp_path / "c", {"net": nn.Linear(2, 2)})
    half = nn.Linear(2, 2).bfloat16()
    with pytest.warns(
        RuntimeWarning, match=r"net: converted while loading: weight \(torch.float32 to torch.bfloat16\)"
    ):
        load_checkpoint(tmp_path / "c", {"net": half})
    assert half.weight.dtype is torch.bfloat16


def test_differences_are_listed_and_nothing_is_changed(tmp_path):
    save_checkpoint(tmp_path / "c", {"net": nn.Linear(3, 2), "a": Counter(1), "b": Meter(2)})
    other, a, b = nn.Linear(3, 5, bias=False), Meter(), Counter()
    other.new = nn.Parameter(torch.zeros(1))
    before = weights(other)
    with pytest.raises(CheckpointMismatchError) as error:
        load_checkpoint(
            tmp_path / "c", {"net": other, "a": a, "b": b, "c": Counter(), "opt": torch.optim.SGD([other.new])}
        )
    for line in (
        "net.new: missing in the checkpoint",
        "net.bias: only in the checkpoint",
        "net.weight: shape (2, 3) in the checkpoint, (5, 3) here",
        "a: Counter in the checkpoint, Meter here",
        "b: Meter in the checkpoint, Counter here",
        "c: not in the checkpoint, which holds net (Linear), a (Counter), b (Meter)",
        "opt: not in the checkpoint",
    ):
        assert line in str(error.value)
    assert weights(other) == before
    assert (a.n, b.n) == (0, 0)


def test_not_strict_loads_the_rest_and_reports(tmp_path):
    source = nn.Linear(3, 2)
    save_checkpoint(tmp_path / "c", {"net": source, "a": Counter(1), "b": Counter(2)})
    other, a = nn.Linear(4, 2), Counter()
    with pytest.warns(RuntimeWarning, match=r"left out: net\.weight: shape"):
        loaded = load_checkpoint(tmp_path / "c", {"net": other, "a": a, "b": Meter()}, strict=False)
    assert loaded.differences == (
        "net.weight: shape (2, 3) in the checkpoint, (2, 4) here",
        "b: Counter in the checkpoint, Meter here",
    )
    assert other.bias.tolist() == source.bias.tolist()
    assert a.n == 1


def test_a_kind_that_differs_is_named(tmp_path):
    save_checkpoint(tmp_path / "c", {"x": nn.Linear(1, 1)})
    with pytest.raises(CheckpointMismatchError, match=r"x: a model \(Linear\) in the checkpoint, a stateful here"):
        load_checkpoint(tmp_path / "c", {"x": Counter()})


def test_what_is_not_asked_for_stays_unread_with_one_line(tmp_path, caplog):
    save_checkpoint(tmp_path / "c", {"a": Counter(1), "b": Counter(2)})
    with caplog.at_level(logging.INFO, "accel_ckpt"):
        loaded = load_checkpoint(tmp_path / "c", {"a": Counter()})
    assert loaded.unread == ("b",)
    assert [record.getMessage().endswith("also holds b, left unread") for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"a": 3, "b": nn.Linear(1, 1), "c": object()}, r"a \(int\), c \(object\)"),
        ({"": Counter()}, "non-empty"),
        ({"a/b": Counter()}, "without '/'"),
    ],
)
def test_what_has_no_state_is_refused_all_at_once(tmp_path, objects, message):
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path / "c", objects)
    assert list(tmp_path.iterdir()) == []


def test_one_object_under_two_names_is_refused(tmp_path):
    one = Counter()
    with pytest.raises(CheckpointError, match="'a' and 'b' are the same object"):
        save_checkpoint(tmp_path / "c", {"a": one, "b": one})


@pytest.mark.parametrize("step", [-1, True, 1.0, "1"])
def test_steps_are_counts(tmp_path, step):
    with pytest.raises(CheckpointError, match="count of updates"):
        save_checkpoint(tmp_path / "c", {}, step=step)


def test_metrics_are_numbers(tmp_path):
    with pytest.raises(CheckpointError, match=r"metrics\['loss'\] is 'low', not a number"):
        save_checkpoint(tmp_path / "c", {}, metrics={"loss": "low"})
    save_checkpoint(tmp_path / "c", {}, metrics={"loss": torch.tensor(0.5)})
    assert load_checkpoint(tmp_path / "c", {}).metrics == {"loss": 0.5}


def test_files_of_hooks_belong_to_the_checkpoint(tmp_path):
    def hook(directory):
        (directory / "sub").mkdir()
        (directory / "sub" / "config.json").write_text("{}")

    save_checkpoint(tmp_path / "c", {}, before_commit=hook)
    assert (tmp_path / "c" / "sub" / "config.json").read_text() == "{}"
    (tmp_path / "c" / "sub" / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"sub/config\.json was altered"):
        load_checkpoint(tmp_path / "c", {})


def test_a_hook_that_fails_or_links_leaves_nothing(tmp_path):
    def fail(directory):
        raise ValueError("no config")

    with pytest.raises(CheckpointError, match="ValueError: no config"):
        save_checkpoint(tmp_path / "c", {}, before_commit=fail)
    with pytest.raises(CheckpointError, match="symbolic link"):
        save_checkpoint(tmp_path / "c", {}, before_commit=lambda path: (path / "l").symlink_to("/etc/passwd"))
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_refuses_its_state_is_named(tmp_path):
    class Refusing(Counter):
        def load_state_dict(self, state):
            raise RuntimeError("not today")

    save_checkpoint(tmp_path / "c", {"r": Refusing()})
    with pytest.raises(CheckpointError, match=r"loading .* failed: RuntimeError: not today"):
        load_checkpoint(tmp_path / "c", {"r": Refusing()})


def test_missing_foreign_and_unfinished_places_say_what_they_are(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="there is no "):
        load_checkpoint(tmp_path / "none", {})
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointNotFoundError, match="is a file"):
        load_checkpoint(tmp_path / "file", {})
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    with pytest.raises(CheckpointNotFoundError, match="Found: nothing"):
        load_checkpoint(foreign, {})
    (foreign / "pytorch_model.bin").write_bytes(b"")
    (foreign / "optimizer.bin").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match=r"no manifest\.json\. Found: optimizer\.bin, pytorch_model\.bin"):
        load_checkpoint(foreign, {})
    save_checkpoint(tmp_path / "run" / "c", {})
    with pytest.raises(CheckpointNotFoundError, match="It holds checkpoints: c; pass one"):
        load_checkpoint(tmp_path / "run", {})
    staging = tmp_path / ".c.accel-staging-0123456789abcdef"
    staging.mkdir()
    with pytest.raises(CheckpointNotFoundError, match="is being written"):
        load_checkpoint(staging, {})


def test_saving_over_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a directory"):
        save_checkpoint(tmp_path / "file", {})
    with pytest.raises(CheckpointError, match="a part of the path is a file"):
        save_checkpoint(tmp_path / "file" / "c", {})
    assert (tmp_path / "file").read_text() == "mine"


def test_links_and_relative_paths_lead_to_the_real_place(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    assert save_checkpoint("link/c", {}) == tmp_path / "real" / "c"
    load_checkpoint("real/c", {})


def test_an_environment_of_several_ranks_without_a_group_is_refused(tmp_path, monkeypatch):
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match="this is rank 1 of 2 by its environment, but there is no process group"):
        save_checkpoint(tmp_path / "c", {})
    assert not (tmp_path / "c").exists()


def test_importing_the_package_imports_no_torch():
    code = "import sys, accel_ckpt, accel_ckpt.names; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
