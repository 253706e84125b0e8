import torch
from torch import nn

from accel_precision import upcast_to_fp32


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(torch.bfloat16)
    model[0].weight.requires_grad_(False)
    return model


def test_parameters_and_buffers_become_fp32_and_stay_the_same_objects():
    model = net()
    before, values = list(model.parameters()), [p.float() for p in model.parameters()]
    changed = upcast_to_fp32(model)
    assert changed == ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"]
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    assert model[1].num_batches_tracked.dtype is torch.int64
    assert upcast_to_fp32(model) == []


def test_what_is_not_trained_can_be_left():
    model = net()
    assert upcast_to_fp32(model, trained_only=True) == ["0.bias", "1.weight", "1.bias"]
    assert model[0].weight.dtype is model[1].running_mean.dtype is torch.bfloat16
