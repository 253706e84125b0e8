from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_precision import AORecipeKwargs, AutocastKwargs, AutocastStep, PrecisionPolicy, autocast_step

BF16 = PrecisionPolicy.from_name("bf16")


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Context:
    device: torch.device = CPU


@pytest.fixture
def one_rank_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_step_wraps_the_model_and_says_so():
    step = autocast_step(BF16)
    net = nn.Linear(2, 2)
    assert step.check(net, Context()) == []
    assert step.apply(net, Context()) is net
    assert not torch.equal(net(torch.full((1, 2), 1.001)), net._original_forward(torch.full((1, 2), 1.001)))
    assert step.describe(net, Context()) == "forward under autocast to bf16, outputs in fp32"
    assert (step.name, step.slot, step.gives) == ("autocast", "autocast", {"autocast"})


def test_options_reach_the_wrapper():
    net = nn.Linear(2, 2)
    autocast_step(BF16, AutocastKwargs(enabled=False)).apply(net, Context())
    x = torch.full((1, 2), 1.001)
    assert torch.equal(net(x), net._original_forward(x))


def test_entry_points_by_their_usual_names_compute_alike():
    class Encoder(nn.Linear):
        def encode(self, x):
            return self.forward(x) + nn.functional.linear(x, self.weight)

        def helper(self, x):
            return nn.functional.linear(x, self.weight)

    net, x = Encoder(2, 2), torch.full((1, 2), 1.001)
    plain = net.helper(x)
    autocast_step(BF16).apply(net, Context())
    assert torch.equal(net.helper(x), plain), "only entry points are wrapped"
    assert net.encode(x).dtype is torch.float32
    assert not torch.equal(net.encode(x) - net(x), plain)
    autocast_step(PrecisionPolicy()).apply(net, Context())
    assert not {"forward", "encode", "_original_encode"} & vars(net).keys()


def test_a_device_that_cannot_is_a_complaint():
    (complaint,) = AutocastStep(BF16).check(nn.Linear(1, 1), Context(torch.device("meta")))
    assert "'bf16' asks for torch.bfloat16 on 'meta'" in complaint


def test_descriptions_of_the_other_policies():
    assert "nothing to do" in autocast_step(PrecisionPolicy()).describe(None, Context())
    assert "around fp8" in autocast_step(PrecisionPolicy.from_name("fp8", AORecipeKwargs())).describe(None, Context())
    kept = PrecisionPolicy(compute=torch.float16, output=None)
    assert autocast_step(kept).describe(None, Context()) == "forward under autocast to fp16, outputs as computed"


def test_under_ddp_the_inner_model_is_wrapped(one_rank_group):
    net = nn.Linear(2, 2)
    model = DistributedDataParallel(net)
    assert autocast_step(BF16).apply(model, Context()) is model
    assert "forward" not in vars(model)
    out = model(torch.ones(1, 2))
    out.sum().backward()
    assert out.dtype is net.weight.grad.dtype is torch.float32
    assert torch.equal(net(torch.ones(1, 2)), out), "the unwrapped model computes alike"
