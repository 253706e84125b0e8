import pickle

import pytest
import torch
from torch import nn

from accel_precision import GradScaler, GradScalerKwargs, PrecisionPolicy, upcast_to_fp32
from accel_state.errors import PrecisionError


def scaler_of(scale: float = 4.0, interval: int = 1) -> GradScaler:
    return GradScaler("cpu", init_scale=scale, growth_interval=interval)


def line(value: float = 1.0) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def test_two_optimizers_that_each_update_leave_each_other_alone():
    scaler = scaler_of()
    layers = [line(), line()]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.25) for layer in layers]
    for layer in layers:
        scaler.scale(layer(torch.ones(1, 1)).sum()).backward()
    scaler.unscale_(optimizers[1])
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
    assert [layer.weight.item() for layer in layers] == [0.75, 0.75]
    assert scaler.get_scale() == 8.0, "one growth for the iteration, not one per optimizer"


def test_overflow_skips_and_backs_off():
    scaler = scaler_of()
    layer = line()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler.scale(layer(torch.full((1, 1), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert layer.weight.item() == 1.0
    assert scaler.get_scale() == 2.0


def test_the_update_that_is_due_is_part_of_every_snapshot():
    scaler = scaler_of(interval=3)
    layer = line()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler.scale(layer(torch.ones(1, 1)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()
    assert scaler.state_dict()["_growth_tracker"] == 1
    other = scaler_of(scale=1.0)
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 4.0


def test_an_explicit_scale_takes_effect_at_once():
    scaler = scaler_of()
    scaler.scale(torch.ones(1))
    scaler.update(16.0)
    assert scaler.get_scale() == 16.0


def test_a_disabled_scaler_passes_everything_through():
    scaler = GradScaler("cpu", enabled=False)
    layer = line()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    loss = layer(torch.ones(1, 1)).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert (layer.weight.item(), scaler.get_scale()) == (0.5, 1.0)


def test_parameters_kept_in_fp16_are_refused_with_the_way_out():
    layer = line().half()
    scaler, optimizer = scaler_of(), torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler.scale(layer(torch.ones(1, 1).half()).sum()).backward()
    with pytest.raises(PrecisionError, match=r"kept in torch.float16.*upcast_to_fp32\(model\)"):
        scaler.step(optimizer)
    assert upcast_to_fp32(layer) == ["weight"]
    layer.zero_grad()
    scaler = scaler_of()
    scaler.scale(layer(torch.ones(1, 1)).sum()).backward()
    scaler.step(optimizer)
    assert layer.weight.item() == 0.0


def test_a_fused_optimizer_skips_inside_its_own_step():
    scaler, layer = scaler_of(), line()
    optimizer = torch.optim.Adam(layer.parameters(), lr=1.0, fused=True)
    scaler.scale(layer(torch.full((1, 1), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (layer.weight.item(), scaler.get_scale()) == (1.0, 2.0)


def test_fp16_training_on_cpu_follows_fp32():
    torch.manual_seed(0)
    policy = PrecisionPolicy.from_name("fp16")
    x, y = torch.randn(16, 4), torch.randn(16, 1)

    def train(half: bool) -> torch.Tensor:
        torch.manual_seed(1)
        net = nn.Linear(4, 1)
        if half:
            policy.wrap(net, "cpu")
        scaler = policy.scaler("cpu", GradScalerKwargs(init_scale=128.0)) if half else GradScaler("cpu", enabled=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            scaler.scale((net(x) - y).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return net.weight.detach().clone()

    assert torch.allclose(train(half=True), train(half=False), atol=5e-3)
