import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_parallel import extract_model_from_parallel, is_compiled_module, is_peft_model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x)


class Doubled:
    """Stands for accel-precision's forward: met by its `bare_view`."""

    def __init__(self, model):
        self.inner = model.inner

    def __call__(self, x):
        return self.inner(x) * 2

    def bare_view(self, model):
        view = object.__new__(type(model))
        view.__dict__.update({name: value for name, value in vars(model).items() if name != "forward"})
        return view


@pytest.fixture
def one_rank_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_bare_model_is_itself():
    net = Net()
    assert extract_model_from_parallel(net) is net
    assert extract_model_from_parallel(net, keep_fp32_wrapper=False, keep_torch_compile=False, recursive=True) is net
    assert extract_model_from_parallel("not a module", recursive=True) == "not a module"


def test_ddp_is_taken_off(one_rank_group):
    net = Net()
    assert extract_model_from_parallel(DistributedDataParallel(net)) is net


def test_without_autocast_is_a_view_and_the_model_keeps_it():
    net, x = Net(), torch.ones(1, 2)
    net.forward = Doubled(net)
    assert extract_model_from_parallel(net) is net
    view = extract_model_from_parallel(net, keep_fp32_wrapper=False)
    assert view is not net
    assert torch.equal(view(x) * 2, net(x))
    assert view.inner is net.inner


@pytest.mark.parametrize("keep", [True, False])
def test_compiled_models(keep):
    net = Net()
    model = torch.compile(net, backend="eager")
    assert is_compiled_module(model)
    assert not is_compiled_module(net)
    assert extract_model_from_parallel(model, keep_torch_compile=keep) is (model if keep else net)


def test_compiled_around_ddp_stays_compiled_and_the_prepared_one_works(one_rank_group):
    net, x = Net(), torch.ones(1, 2)
    model = torch.compile(DistributedDataParallel(net), backend="eager")
    inner = extract_model_from_parallel(model)
    assert is_compiled_module(inner)
    assert inner._orig_mod is net
    assert torch.equal(inner(x), model(x))
    assert isinstance(model._orig_mod, DistributedDataParallel)
    assert extract_model_from_parallel(model, keep_torch_compile=False) is net


def test_wrapped_parts_are_unwrapped_in_a_view(one_rank_group):
    net = Net()
    net.inner = DistributedDataParallel(net.inner)
    view = extract_model_from_parallel(net, recursive=True)
    assert isinstance(view.inner, nn.Linear)
    assert isinstance(net.inner, DistributedDataParallel)
    assert extract_model_from_parallel(net) is net


def test_models_of_peft_are_known_without_importing_it(monkeypatch):
    assert not is_peft_model(nn.Linear(2, 2))
    library = types.ModuleType("peft")
    library.PeftModel = type("PeftModel", (nn.Module,), {})
    monkeypatch.setitem(sys.modules, "peft", library)
    model = library.PeftModel()
    assert is_peft_model(model)
    assert not is_peft_model(nn.Linear(2, 2))
