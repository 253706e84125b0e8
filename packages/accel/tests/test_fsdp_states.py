"""`save_fsdp_model` and its like: both forms, both versions of FSDP, read on another number of ranks."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import accel_ckpt
from accel import Accelerator
from accel.utils import (
    FullyShardedDataParallelPlugin,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from accel_state.errors import CheckpointCorruptError, CheckpointNotFoundError, SettingError
from accel_testkit.faults import message_of

FORMS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.first(x).relu())


def prepared(version: int, form: str, seed: int):
    """A sharded model and its optimizer, after a step; the plugin and the Accelerator."""
    torch.manual_seed(seed)
    net = Net()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=form)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01 * seed)
    net, optimizer = accelerator.prepare(net, optimizer)
    step(accelerator, net, optimizer)
    return plugin, accelerator, net, optimizer


def step(accelerator, net, optimizer) -> None:
    accelerator.backward(net(torch.ones(2, 4)).pow(2).sum())
    optimizer.step()
    optimizer.zero_grad()


def weights_of(accelerator, net):
    return {name: t.tolist() for name, t in accelerator.get_state_dict(net).items()}


def save(directory, version, form):
    plugin, accelerator, net, optimizer = prepared(version, form, seed=1)
    save_fsdp_model(plugin, accelerator, net, directory)
    save_fsdp_optimizer(plugin, accelerator, optimizer, net, directory)
    before = weights_of(accelerator, net)
    step(accelerator, net, optimizer)
    return before, weights_of(accelerator, net)


def load(directory, version, form):
    plugin, accelerator, net, optimizer = prepared(version, form, seed=2)
    load_fsdp_model(plugin, accelerator, net, directory)
    load_fsdp_optimizer(plugin, accelerator, optimizer, net, directory)
    before = weights_of(accelerator, net)
    step(accelerator, net, optimizer)
    return before, weights_of(accelerator, net)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("version", [1, 2])
def test_what_two_ranks_save_three_go_on_from(tmp_path, ranks, version, form):
    before, after = ranks(save, 2, tmp_path, version, form)[0]
    again, next_one = ranks(load, 3, tmp_path, version, form)[0]
    assert before == again
    assert before != after
    for name, value in after.items():  # the optimizer's state and its learning rate came along
        torch.testing.assert_close(torch.tensor(next_one[name]), torch.tensor(value), atol=1e-6, rtol=1e-5)
    if form == "FULL_STATE_DICT":
        assert {path.name for path in tmp_path.iterdir()} == {"pytorch_model_fsdp.bin", "optimizer.bin"}
        whole = torch.load(tmp_path / "pytorch_model_fsdp.bin", weights_only=True)
    else:
        assert {path.name for path in tmp_path.iterdir()} == {"pytorch_model_fsdp_0", "optimizer_0"}
        accel_ckpt.merge_fsdp_weights(tmp_path / "pytorch_model_fsdp_0", tmp_path / "merged")
        whole = {}
        accel_ckpt.read_weights(tmp_path / "merged", lambda name, tensor: whole.update({name: tensor.clone()}))
    assert {name: tensor.tolist() for name, tensor in whole.items()} == before


def test_one_version_reads_what_the_other_saved(tmp_path, ranks):
    for form in FORMS:
        before, _ = ranks(save, 2, tmp_path / form, 1, form)[0]
        again, _ = ranks(load, 2, tmp_path / form, 2, form)[0]
        assert before == again


class Bomb:
    def __reduce__(self):
        return print, ("this ran",)


def load_hostile(directory, form):
    plugin, accelerator, net, _ = prepared(2, form, seed=2)
    return message_of(lambda: load_fsdp_model(plugin, accelerator, net, directory))


@pytest.mark.parametrize("form", FORMS)
def test_pickled_code_is_refused_on_every_rank(tmp_path, ranks, capfd, form):
    ranks(save, 2, tmp_path, 2, form)
    full = form == "FULL_STATE_DICT"
    (tmp_path / ("pytorch_model_fsdp.bin" if full else "pytorch_model_fsdp_0/.metadata")).write_bytes(
        pickle.dumps(Bomb())
    )
    one, two = ranks(load_hostile, 2, tmp_path, form)
    assert one == two
    assert one.startswith(CheckpointCorruptError.__name__)
    assert "this ran" not in capfd.readouterr().out


def adapters(directory, form):
    plugin, accelerator, net, _ = prepared(2, form, seed=1)
    accelerator.unwrap_model(net).peft_config = {}
    for parameter in accelerator.unwrap_model(net).first.parameters():
        parameter.requires_grad = False
    save_fsdp_model(plugin, accelerator, net, directory, adapter_only=True)
    saved = weights_of(accelerator, net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    load_fsdp_model(plugin, accelerator, net, directory, adapter_only=True)
    return saved, weights_of(accelerator, net)


@pytest.mark.parametrize("form", FORMS)
def test_of_a_peft_model_only_what_it_trains(tmp_path, ranks, form):
    saved, loaded = ranks(adapters, 2, tmp_path, form)[0]
    assert loaded["second.weight"] == saved["second.weight"]
    assert not any(map(any, loaded["first.weight"]))


def refusals(directory):
    plugin, accelerator, net, _ = prepared(1, "FULL_STATE_DICT", seed=1)
    said = [message_of(lambda: load_fsdp_model(plugin, accelerator, net, directory / "nothing"))]
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    said.append(message_of(lambda: load_fsdp_model(plugin, accelerator, net, directory / "nothing")))
    said.append(message_of(lambda: save_fsdp_model(plugin, accelerator, net, directory, use_dcp=False)))
    (directory / "pytorch_model_fsdp_0").mkdir(exist_ok=True)
    (directory / "pytorch_model_fsdp_0" / "mine.txt").touch()
    accelerator.wait_for_everyone()
    said.append(message_of(lambda: save_fsdp_model(plugin, accelerator, net, directory)))
    plugin.set_state_dict_type("LOCAL_STATE_DICT")
    said.append(message_of(lambda: save_fsdp_model(plugin, accelerator, net, directory)))
    return said


def test_what_cannot_be_done_is_refused_on_every_rank(tmp_path, ranks):
    one, two = ranks(refusals, 2, tmp_path)
    assert one == two
    kinds = [text.partition(":")[0] for text in one]
    missing, wrong = CheckpointNotFoundError.__name__, SettingError.__name__
    assert kinds == [missing, missing, wrong, "CheckpointError", wrong]
    assert "holds other files (mine.txt)" in one[3]
    assert "use FULL_STATE_DICT or SHARDED_STATE_DICT" in one[4]
    assert (tmp_path / "pytorch_model_fsdp_0" / "mine.txt").is_file()


def save_twice(directory):
    plugin, accelerator, net, optimizer = prepared(2, "SHARDED_STATE_DICT", seed=1)
    save_fsdp_model(plugin, accelerator, net, directory)
    step(accelerator, net, optimizer)
    save_fsdp_model(plugin, accelerator, net, directory)
    return weights_of(accelerator, net)


def test_an_older_state_of_the_name_is_replaced(tmp_path, ranks):
    newest = ranks(save_twice, 2, tmp_path)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model_fsdp_0"]
    assert ranks(load_model_only, 2, tmp_path)[0] == newest


def load_model_only(directory):
    plugin, accelerator, net, _ = prepared(2, "SHARDED_STATE_DICT", seed=2)
    load_fsdp_model(plugin, accelerator, net, directory)
    return weights_of(accelerator, net)
