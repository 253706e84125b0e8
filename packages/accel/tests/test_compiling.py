import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin, has_compiled_regions, is_compiled_module
from accel_state.errors import SettingError
from accel_testkit.training import tied_net, tokens

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def test_a_model_is_compiled_as_the_backend_says(tmp_path):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend="eager")
    assert accelerator.state.dynamo_plugin == TorchDynamoPlugin(backend="EAGER")
    bare = nn.Linear(2, 2)
    model = accelerator.prepare(bare)
    assert accelerator.prepare(model) is model and accelerator.prepare(bare) is model
    assert is_compiled_module(model) and sorted(model.state_dict()) == ["bias", "weight"]
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is bare
    assert sorted(accelerator.get_state_dict(model)) == ["bias", "weight"]
    out = model(torch.ones(1, 2))
    assert out.dtype is torch.float32 and out[0, 0] == out[0, 0].bfloat16()  # computed in bf16, handed out in fp32
    accelerator.backward(out.sum())
    before = bare.weight.detach().clone()
    accelerator.save_state(tmp_path / "c")
    nn.init.zeros_(bare.weight)
    accelerator.load_state(tmp_path / "c")
    assert torch.equal(bare.weight, before)
    assert is_compiled_module(accelerator.prepare_model(nn.Linear(1, 1), evaluation_mode=True))
    assert "compiled as a whole by eager" in accelerator.explain()


def test_the_environment_may_say_so(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(tied_net())
    assert has_compiled_regions(model) and not is_compiled_module(model)
    assert list(model.state_dict()) == list(tied_net().state_dict())
    assert torch.allclose(model(tokens()[0]), tied_net()(tokens()[0]), atol=1e-6)


def test_what_contradicts_or_has_no_effect_is_said():
    with pytest.raises(SettingError, match="dynamo_backend='eager' beside dynamo_plugin"):
        Accelerator(cpu=True, dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    with pytest.raises(SettingError, match="dynamo_plugin='eager' is a str"):
        Accelerator(cpu=True, dynamo_plugin="eager")
    with pytest.raises(SettingError, match="'zip' does not exist"):
        Accelerator(cpu=True, dynamo_backend="zip")
    with pytest.warns(UserWarning, match="compiles nothing: its backend is NO"):
        Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(fullgraph=True))


def test_checkpointing_by_the_plugin_needs_both_switches():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing_offload=True)
    with pytest.raises(SettingError, match="activation_checkpointing is False: set both, or neither"):
        Accelerator(cpu=True, fsdp_plugin=plugin)


def test_sums_with_their_items_through_the_facade():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    for items, value in ((3, 1.0), (1, 9.0)):
        with accelerator.accumulate(model):
            accelerator.backward((value * model(torch.ones(items, 1))).sum(), num_items=items)
    assert model.weight.grad.item() == (3 * 1 + 9) / 4
