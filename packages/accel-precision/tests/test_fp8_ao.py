"""torchao itself, on the CPU."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from torch import nn

from accel_precision import (
    AORecipeKwargs,
    FP8BackendType,
    PrecisionPolicy,
    convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers,
    fp8_step,
    has_ao_layers,
)
from accel_precision.fp8 import ao
from accel_state.errors import PrecisionError

torchao = ao._library()
EMULATED = torchao.Float8LinearConfig(emulate=True)


def net(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in pairwise(sizes)))


def kinds(model: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in model.modules() if isinstance(layer, nn.Linear)]


def test_first_and_last_layers_and_unfit_sizes_stay_as_they_are():
    model = net(8, 32, 32, 20, 32, 48, 4)
    assert not has_ao_layers(model)
    names = [name for name, layer in model.named_modules() if filter_first_and_last_linear_layers(model, name)]
    assert names == ["1.0", "4.0"]
    convert_model_to_fp8_ao(model)
    assert has_ao_layers(model)
    assert kinds(model) == ["Linear", "Float8Linear", "Linear", "Linear", "Float8Linear", "Linear"]


def test_the_filter_asks_a_single_layer_for_its_sizes_alone():
    assert filter_first_and_last_linear_layers(nn.Linear(16, 32), "head")
    assert not filter_first_and_last_linear_layers(nn.Linear(16, 20), "body")


def test_layers_with_a_forward_of_their_own_are_left_alone():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(16, 16), Doubled(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    convert_model_to_fp8_ao(model)
    assert kinds(model) == ["Linear", "Doubled", "Float8Linear", "Linear"]


def test_parameters_hooks_and_mode_survive():
    model = net(16, 16, 16, 16).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    model[1][0].register_forward_hook(lambda layer, inputs, out: seen.append(type(layer).__name__))
    before = list(model.parameters())
    model = convert_model_to_fp8_ao(model)
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert not model[1][0].training
    model(torch.ones(16, 16)).sum().backward()
    assert seen == ["Float8Linear"]
    weight = model[1][0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[1][0].weight, weight), "an optimizer made before the conversion trains the layer"


def test_a_filter_of_the_users_own_and_a_model_of_one_layer():
    config = torchao.Float8LinearConfig.from_recipe_name("rowwise")
    layer = nn.Linear(16, 16)
    converted = convert_model_to_fp8_ao(layer, config, lambda layer, name: True)
    assert kinds(converted) == ["Float8Linear"]
    assert converted.weight is layer.weight
    assert convert_model_to_fp8_ao(converted, config, lambda layer, name: True) is converted


def test_a_model_without_a_layer_to_convert_is_announced():
    with pytest.warns(UserWarning, match="no layer of Sequential computes in fp8.*module_filter_func"):
        convert_model_to_fp8_ao(net(16, 16, 16))


def test_training_follows_fp32():
    x, y = torch.randn(64, 16), torch.randn(64, 1)

    def train(name: str) -> list[float]:
        model = net(16, 32, 32, 1)
        policy = PrecisionPolicy.from_name(name)
        policy.wrap(policy.convert(model), "cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(20):
            loss = (model(x) - y).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    full, eight = train("no"), train("fp8")
    assert full != eight
    assert all(abs(a - b) < 0.02 for a, b in zip(full, eight, strict=True))


def test_the_policy_computes_in_bf16_around_it_and_returns_fp32():
    policy = PrecisionPolicy.from_name("fp8", AORecipeKwargs(config=EMULATED))
    assert (policy.name, policy.compute, policy.fp8.kind) == ("fp8", torch.bfloat16, FP8BackendType.AO)
    assert policy.scaler("cpu") is None
    model = policy.wrap(policy.convert(net(16, 32, 32, 16)), "cpu")
    seen = []
    model[0][0].register_forward_hook(lambda layer, inputs, out: seen.append(out.dtype))
    assert model(torch.ones(16, 16)).dtype is torch.float32
    assert seen == [torch.bfloat16]
    assert model[1][0].config.emulate


def test_copies_keep_computing_in_fp8():
    policy = PrecisionPolicy.from_name("fp8", AORecipeKwargs(config=EMULATED))
    model = policy.wrap(policy.convert(net(16, 32, 32, 16)), "cpu")
    x = torch.randn(16, 16)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert has_ao_layers(other)
        assert torch.equal(other(x), model(x))


def test_eight_bit_gathering_is_left_out_where_nothing_is_sharded():
    policy = PrecisionPolicy.from_name("fp8", AORecipeKwargs())
    assert policy.fp8.recipe.enable_fsdp_float8_all_gather
    assert not policy.convert(net(16, 16, 16, 16))[1][0].config.enable_fsdp_float8_all_gather
    assert policy.convert(net(16, 16, 16, 16), sharded=True)[1][0].config.enable_fsdp_float8_all_gather


def test_a_config_that_contradicts_a_field_or_is_none_is_refused():
    with pytest.raises(PrecisionError, match=r"pad_inner_dim=True contradicts config.pad_inner_dim=False"):
        AORecipeKwargs(config=EMULATED, pad_inner_dim=True)
    settings = type("Settings", (), {"pad_inner_dim": False, "enable_fsdp_float8_all_gather": False})()
    with pytest.raises(PrecisionError, match="config is a Settings: give a torchao"):
        PrecisionPolicy.from_name("fp8", AORecipeKwargs(config=settings)).convert(net(16, 16, 16, 16))


def test_devices_without_eight_bit_products_are_refused_unless_emulated(monkeypatch):
    plain, emulated = (ao.TorchAo(AORecipeKwargs(config=config)) for config in (None, EMULATED))
    assert plain.obstacle(torch.device("cpu")) is None
    assert "has no 8-bit products" in plain.obstacle(torch.device("mps"))
    monkeypatch.setattr(ao, "check_cuda_fp8_capability", lambda: False)
    assert "capability 8.9 or more: use mixed_precision='bf16'" in plain.obstacle(torch.device("cuda", 0))
    assert emulated.obstacle(torch.device("cuda", 0)) is None
    with pytest.raises(PrecisionError, match="on 'xla' has no 8-bit products"):
        PrecisionPolicy.from_name("fp8", AORecipeKwargs()).require("xla")
    monkeypatch.setattr(ao, "check_cuda_fp8_capability", lambda: True)
    assert plain.obstacle(torch.device("cuda", 0)) is None


def test_the_step_converts_once_and_says_so():
    context = type("Context", (), {"device": torch.device("cpu")})()
    step = fp8_step(PrecisionPolicy.from_name("fp8", AORecipeKwargs()).fp8)
    model = net(16, 16, 16, 16)
    assert step.check(model, context) == []
    assert step.apply(model, context) is model
    layer = model[1][0]
    assert step.apply(model, context)[1][0] is layer
    assert (step.name, step.slot, step.describe(model, context)) == ("fp8", "fp8", "linear layers in fp8 by torchao")
    context.device = torch.device("mps")
    assert "no 8-bit products" in step.check(model, context)[0]
