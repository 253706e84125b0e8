"""transformer-engine by its documented interface: a strict fake, since it runs on NVIDIA GPUs alone."""

import copy
import importlib.util
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_precision import (
    FP8BackendType,
    PrecisionPolicy,
    TERecipeKwargs,
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    has_transformer_engine_layers,
    unwrap_forward,
)
from accel_precision.fp8 import backend, te
from accel_state.errors import PrecisionError

_spec = importlib.util.spec_from_file_location("fake_te", Path(__file__).with_name("fake_transformer_engine.py"))
fake = importlib.util.module_from_spec(_spec)
sys.modules["fake_te"] = fake  # so that what it defines pickles
_spec.loader.exec_module(fake)
CUDA = torch.device("cuda", 0)


@pytest.fixture(params=["old", "new"])
def release(request, monkeypatch):
    """The fake as the installed library, in two releases."""
    for name, module in fake.modules(request.param).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(backend, "is_transformer_engine_available", lambda: True)
    return request.param


@pytest.fixture
def new_release(monkeypatch):
    for name, module in fake.modules("new").items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(backend, "is_transformer_engine_available", lambda: True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 32), nn.LayerNorm(32, eps=1e-3)
        self.body, self.last = nn.Linear(32, 16, bias=False), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.body(self.norm(self.first(x))))


def kinds(model: nn.Module) -> list[str]:
    return [f"{type(layer).__module__.split('.')[0]}.{type(layer).__name__}" for layer in model.children()]


def test_layers_are_converted_there_and_back_with_the_same_parameters(release):
    model, x = Net(), torch.randn(4, 16)
    before, out = list(model.parameters()), model(x)
    assert convert_model(model) is model
    assert kinds(model) == ["fake_te.Linear", "fake_te.LayerNorm", "fake_te.Linear", "torch.Linear"]
    assert has_transformer_engine_layers(model)
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert torch.equal(model(x), out)
    convert_model(model, to_transformer_engine=False)
    assert kinds(model) == ["torch.Linear", "torch.LayerNorm", "torch.Linear", "torch.Linear"]
    assert model.norm.eps == 1e-3
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert torch.equal(model(x), out)


def test_kinds_of_layers_can_be_left_out(release):
    assert kinds(convert_model(Net(), _convert_ln=False))[1] == "torch.LayerNorm"
    assert kinds(convert_model(Net(), _convert_linear=False))[:2] == ["torch.Linear", "fake_te.LayerNorm"]
    assert isinstance(convert_model(nn.Linear(16, 16)), fake.Linear)


def test_a_layer_used_in_two_places_stays_one_and_hooks_and_mode_survive(release):
    layer = nn.Linear(16, 16)
    seen = []
    layer.register_forward_hook(lambda *args: seen.append(1))
    model = nn.Sequential(layer, layer, nn.Sequential(layer)).eval()
    convert_model(model)
    assert model[0] is model[1] is model[2][0]
    assert not model[0].training
    model(torch.ones(1, 16))
    assert seen == [1, 1, 1]


def test_forward_runs_in_fp8_while_it_trains_and_in_evaluation_where_asked(release):
    for during_eval in (False, True):
        policy = PrecisionPolicy.from_name("fp8", TERecipeKwargs(use_autocast_during_eval=during_eval))
        assert (policy.name, policy.fp8.kind) == ("fp8", FP8BackendType.TE)
        model = policy.wrap(policy.convert(Net()), "cpu")
        assert model(torch.ones(4, 16)).dtype is torch.float32
        model.eval()
        model(torch.ones(4, 16))
        unwrap_forward(model)(torch.ones(4, 16))
        training, evaluating, unwrapped = model.first.seen
        assert training is not None
        assert (evaluating is training) == during_eval
        assert unwrapped is None
        assert fake.ACTIVE == []


def test_copies_run_in_fp8_too(release):
    policy = PrecisionPolicy.from_name("fp8", TERecipeKwargs(amax_history_len=4))
    model = policy.wrap(policy.convert(Net()), "cpu")
    model(torch.ones(4, 16))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.ones(4, 16))
        assert other.first.seen[-1] == model.first.seen[-1]
        assert other.first.seen[-1].amax_history_len == 4


def test_the_recipe_holds_what_was_asked_for(release):
    asked = TERecipeKwargs(margin=2, fp8_format="E4M3", amax_compute_algo="max")
    recipe = te.TransformerEngine(asked).forward_context.recipe
    assert (recipe.margin, recipe.fp8_format, recipe.amax_compute_algo) == (2, fake.Format.E4M3, "max")
    wanted = TERecipeKwargs(interval=4, override_linear_precision=(False, False, True))
    if release == "old":
        built = te.TransformerEngine(wanted).forward_context
        assert (built.recipe.interval, built.recipe.override_linear_precision) == (4, (False, False, True))
        with pytest.raises(PrecisionError, match="has no Float8BlockScaling, which 'block' scaling needs"):
            _ = te.TransformerEngine(TERecipeKwargs(recipe="block")).forward_context
    else:
        with pytest.raises(PrecisionError, match="interval=4 cannot be honoured"):
            _ = te.TransformerEngine(wanted).forward_context


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({"recipe": "current"}, fake.Float8CurrentScaling()),
        ({"recipe": "current", "fp8_format": "E4M3"}, fake.Float8CurrentScaling(fake.Format.E4M3)),
        ({"recipe": "block"}, fake.Float8BlockScaling()),
        ({"recipe": "mxfp8"}, fake.MXFP8BlockScaling()),
        ({"use_mxfp8_block_scaling": True}, fake.MXFP8BlockScaling()),
        ({"recipe": fake.DelayedScaling(margin=7)}, fake.DelayedScaling(margin=7)),
    ],
)
def test_all_kinds_of_scaling_can_be_had(new_release, options, recipe):
    assert te.TransformerEngine(TERecipeKwargs(**options)).forward_context.recipe == recipe


def test_the_peers_functions_wrap_a_forward(release):
    model = apply_fp8_autowrap(convert_model(Net()), TERecipeKwargs())
    model(torch.ones(1, 16))
    model.eval()(torch.ones(1, 16))
    assert [recipe is None for recipe in model.first.seen] == [False, True]
    other = copy.deepcopy(model).train()
    other(torch.ones(1, 16))
    assert len(other.first.seen) == 3
    assert len(model.first.seen) == 2, "a copy computes with its own layers"
    plain = convert_model(Net())
    forward = contextual_fp8_autocast(type(plain).forward, "a recipe", use_during_eval=True)
    forward(plain.eval(), torch.ones(1, 16))
    assert plain.first.seen == ["a recipe"]


def test_a_model_that_holds_layers_of_the_library_is_left_as_it_is(release):
    policy = PrecisionPolicy.from_name("fp8", TERecipeKwargs())
    model = nn.Sequential(fake.Linear(16, 16, device="cpu"), nn.Linear(16, 16))
    assert policy.convert(model) is model
    assert type(model[1]) is nn.Linear
    with pytest.warns(UserWarning, match="no layer of Sequential computes in fp8"):
        policy.convert(nn.Sequential(nn.Linear(3, 3)))


def test_other_devices_are_refused_with_the_way_out(monkeypatch, new_release):
    engine = te.TransformerEngine(TERecipeKwargs())
    assert "not on 'cpu': use mixed_precision='bf16', or torchao" in engine.obstacle(torch.device("cpu"))
    monkeypatch.setattr(te, "check_cuda_fp8_capability", lambda: False)
    assert "capability 8.9 or more" in engine.obstacle(CUDA)
    monkeypatch.setattr(te, "check_cuda_fp8_capability", lambda: True)
    assert engine.obstacle(CUDA) is None
    blocks = te.TransformerEngine(TERecipeKwargs(use_mxfp8_block_scaling=True))
    monkeypatch.setattr(te, "is_transformer_engine_mxfp8_available", lambda: False)
    assert "capability 10 or more" in blocks.obstacle(CUDA)
    monkeypatch.setattr(te, "is_transformer_engine_mxfp8_available", lambda: True)
    assert blocks.obstacle(CUDA) is None
    with pytest.raises(PrecisionError, match="runs on NVIDIA GPUs, not on 'cpu'"):
        PrecisionPolicy.from_name("fp8", TERecipeKwargs()).require("cpu")
    assert "delayed scaling" in engine.describe()


def test_without_the_library_no_layer_is_its_and_converting_fails():
    assert not has_transformer_engine_layers(Net())
    with pytest.raises(ImportError, match="transformer_engine"):
        convert_model(Net())


def test_a_broken_installation_is_explained(monkeypatch):
    def fail(name):
        raise RuntimeError("Found empty transformer-engine meta package")

    monkeypatch.setattr(te.importlib, "import_module", fail)
    with pytest.raises(PrecisionError, match=r"cannot be imported.*empty transformer-engine meta package"):
        convert_model(Net())
