"""The peer's four functions for sharded models: written on some ranks, read on any other number."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from accel_ckpt import merge_fsdp_weights, read_weights
from accel_state.errors import CheckpointNotFoundError, SettingError


def trained(version, kind, updates=2, learning_rate=1e-2):
    """On a rank: an Accelerator with a sharded model and AdamW after some updates on the same data on all ranks."""
    from accel import Accelerator
    from accel_parallel import FullyShardedDataParallelPlugin
    from accel_testkit.training import tied_net

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy="TRANSFORMER_BASED_WRAP", state_dict_type=kind
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = tied_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    model, optimizer = accelerator.prepare(model, optimizer)
    step(accelerator, model, optimizer, updates)
    return accelerator, plugin, model, optimizer


def step(accelerator, model, optimizer, updates):
    tokens = torch.arange(24).view(2, 12) % 16
    for _ in range(updates):
        logits = model(tokens)
        accelerator.backward(F.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
        optimizer.step()
        optimizer.zero_grad()


def write(version, kind, directory):
    from accel.utils import save_fsdp_model, save_fsdp_optimizer

    accelerator, plugin, model, optimizer = trained(version, kind)
    save_fsdp_model(plugin, accelerator, model, directory)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, directory)
    step(accelerator, model, optimizer, 1)
    return accelerator.get_state_dict(model)


def read(version, kind, directory):
    from accel.utils import load_fsdp_model, load_fsdp_optimizer

    accelerator, plugin, model, optimizer = trained(version, kind, updates=1)
    found = load_fsdp_model(plugin, accelerator, model, directory)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, directory)
    step(accelerator, model, optimizer, 1)
    return accelerator.get_state_dict(model), list(found.missing_keys), list(found.unexpected_keys)


@pytest.mark.parametrize(
    ("version", "kind", "n", "later_version", "later_n"),
    [(2, "SHARDED_STATE_DICT", 2, 2, 3), (2, "FULL_STATE_DICT", 2, 1, 2), (1, "FULL_STATE_DICT", 2, 2, 2)],
)
def test_a_run_goes_on_from_them_on_any_ranks_and_version(tmp_path, ranks, version, kind, n, later_version, later_n):
    (tmp_path / "trainer_state.json").write_text("{}")
    want = ranks(write, n, version, kind, tmp_path)[0]
    got, missing, unexpected = ranks(read, later_n, later_version, kind, tmp_path)[0]
    assert missing == unexpected == []
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-7)
    assert (tmp_path / "trainer_state.json").read_text() == "{}"
    whole = tmp_path / "pytorch_model_fsdp.bin"
    assert whole.exists() == (kind == "FULL_STATE_DICT")
    if whole.exists():
        assert torch.load(whole, weights_only=True).keys() == want.keys()
    merge_fsdp_weights(tmp_path / "pytorch_model_fsdp_0", tmp_path / "merged")
    weights = {}
    aliases = read_weights(tmp_path / "merged", weights.__setitem__)
    assert weights.keys() | aliases.keys() == want.keys()


def adapters(directory):
    from accel.utils import load_fsdp_model, save_fsdp_model

    library = types.ModuleType("peft")
    accelerator, plugin, model, _ = trained(2, "SHARDED_STATE_DICT", updates=0)
    library.PeftModel = type(model)  # a model of this class counts as one with an adapter
    sys.modules["peft"] = library
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("norm"))
    save_fsdp_model(plugin, accelerator, model, directory, adapter_only=True)
    before = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    load_fsdp_model(plugin, accelerator, model, directory, adapter_only=True)
    return {name: torch.equal(parameter.full_tensor(), before[name]) for name, parameter in model.named_parameters()}


def test_of_an_adapter_only_what_is_trained_is_written_and_read(tmp_path, ranks):
    back = ranks(adapters, 2, tmp_path)[0]
    assert any(back.values())
    assert back == {name: name.startswith("norm") for name in back}


def refused(directory):
    from accel.utils import load_fsdp_model, save_fsdp_model

    accelerator, plugin, model, _ = trained(2, "SHARDED_STATE_DICT", updates=0)
    said = []
    (directory / "pytorch_model_fsdp_0").mkdir(exist_ok=True)
    for call in (
        lambda: save_fsdp_model(None, accelerator, model, directory),
        lambda: load_fsdp_model(plugin, accelerator, model, directory),
        lambda: load_fsdp_model(plugin, accelerator, model, directory, model_index=3),
    ):
        try:
            call()
        except (SettingError, CheckpointNotFoundError) as error:
            said.append(str(error))
    return said


def test_what_cannot_be_done_says_why(tmp_path, ranks):
    for without_plugin, foreign, missing in ranks(refused, 2, tmp_path):
        assert "takes the Accelerator's FullyShardedDataParallelPlugin, and got None" in without_plugin
        assert "accel merge-weights" in foreign
        assert "pytorch_model_fsdp_3 is no checkpoint" in missing
