"""Optimizer state goes by parameter name."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_ckpt import load_checkpoint, save_checkpoint
from accel_state.errors import CheckpointError, CheckpointMismatchError


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def update(model: nn.Module, *optimizers) -> None:
    model(torch.ones(4, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def by_name(model: nn.Module, optimizer) -> dict:
    return {
        name: {key: value.tolist() if torch.is_tensor(value) else value for key, value in optimizer.state[p].items()}
        for name, p in model.named_parameters()
        if p in optimizer.state
    }


class Wrapped:
    """What a training library puts around an optimizer."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "adamw_tensor_lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1)),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_each_optimizer_goes_on_bit_for_bit(tmp_path, make):
    torch.manual_seed(0)
    model = net()
    optimizer = make(model.parameters())
    update(model, optimizer)
    save_checkpoint(tmp_path / "c", {"model": model, "optimizer": Wrapped(optimizer)})
    update(model, optimizer)
    want = [p.tolist() for p in model.parameters()]
    model = net()
    optimizer = make(model.parameters())
    load_checkpoint(tmp_path / "c", {"model": model, "optimizer": Wrapped(optimizer)})
    update(model, optimizer)
    assert [p.tolist() for p in model.parameters()] == want


def test_state_loaded_is_private(tmp_path):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    update(model, optimizer)
    save_checkpoint(tmp_path / "c", {"model": model, "optimizer": optimizer})
    before = (tmp_path / "c" / "optimizer.safetensors").read_bytes()
    load_checkpoint(tmp_path / "c", {"model": model, "optimizer": optimizer})
    for path in (tmp_path / "c").iterdir():
        path.write_bytes(b"")  # a mapped view would now end the process
    update(model, optimizer)
    assert before


def test_order_of_parameters_does_not_matter(tmp_path):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    update(model, optimizer)
    want = by_name(model, optimizer)
    save_checkpoint(tmp_path / "c", {"model": model, "optimizer": optimizer})
    model = net()
    optimizer = torch.optim.Adam(reversed(list(model.parameters())))
    load_checkpoint(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert by_name(model, optimizer) == want


def test_groups_keep_their_hyperparameters(tmp_path):
    def make(model):
        groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "betas": (0.5, 0.6)}]
        return torch.optim.AdamW(groups, lr=0.1)

    model = net()
    optimizer = make(model)
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.param_groups[1]["note"] = "mine"
    save_checkpoint(tmp_path / "c", {"model": model, "optimizer": optimizer})
    model = net()
    optimizer = make(model)
    load_checkpoint(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.1]
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.6)
    assert optimizer.param_groups[1]["note"] == "mine"


def test_several_models_and_optimizers(tmp_path):
    def make():
        left, right = net(), net()
        return (
            left,
            right,
            torch.optim.Adam([*left.parameters(), *right.parameters()]),
            torch.optim.SGD(right.parameters()),
        )

    left, right, both, one = make()
    update(left, both)
    update(right, both, one)
    want = by_name(left, both), by_name(right, both)
    save_checkpoint(tmp_path / "c", {"left": left, "right": right, "both": both, "one": one})
    assert "right.1.bias/exp_avg" in load_file(tmp_path / "c" / "optimizer.safetensors")
    left, right, both, one = make()
    load_checkpoint(tmp_path / "c", {"one": one, "both": both, "right": right, "left": left})
    assert (by_name(left, both), by_name(right, both)) == want


def test_parameters_of_no_saved_model_go_by_their_place(tmp_path):
    model, free = net(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([*model.parameters(), free])
    free.grad = torch.ones(2)
    optimizer.step()
    save_checkpoint(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert "param_groups.0.4/exp_avg" in load_file(tmp_path / "c" / "optimizer.safetensors")
    model, free = net(), nn.Parameter(torch.ones(2))
    fresh = torch.optim.Adam([*model.parameters(), free])
    load_checkpoint(tmp_path / "c", {"model": model, "optimizer": fresh})
    assert (
        fresh.state[free]["exp_avg"].tolist()
        == optimizer.state[optimizer.param_groups[0]["params"][4]]["exp_avg"].tolist()
    )


def test_differences_are_listed(tmp_path):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    update(model, optimizer)
    save_checkpoint(tmp_path / "c", {"model": model, "optimizer": optimizer})
    wider = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1, bias=False), nn.Linear(1, 1))
    other = torch.optim.SGD(wider.parameters())
    with pytest.raises(CheckpointMismatchError) as error:
        load_checkpoint(tmp_path / "c", {"model": wider, "optimizer": other})
    for line in (
        "optimizer: Adam in the checkpoint, SGD here",
        "optimizer: model.2.bias: missing in the checkpoint",
        "optimizer: model.1.bias: only in the checkpoint",
        "optimizer: model.0.weight: shape (3, 2) in the checkpoint, (4, 2) here",
    ):
        assert line in str(error.value)


def test_other_grouping_is_a_difference(tmp_path):
    model = net()
    save_checkpoint(tmp_path / "c", {"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    regrouped = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    with pytest.raises(CheckpointMismatchError, match="grouped differently"):
        load_checkpoint(tmp_path / "c", {"model": model, "optimizer": regrouped})


def test_not_strict_keeps_what_the_checkpoint_has_not(tmp_path):
    model = net()
    optimizer = torch.optim.Adam(model[0].parameters(), lr=0.3)
    update(model, optimizer)
    save_checkpoint(tmp_path / "c", {"model": model, "optimizer": optimizer})
    want = by_name(model, optimizer)
    more = torch.optim.Adam(model.parameters(), lr=0.7)
    update(model, more)
    kept = by_name(model, more)["1.bias"]
    with pytest.warns(RuntimeWarning, match=r"model\.1\.weight: missing in the checkpoint"):
        load_checkpoint(tmp_path / "c", {"model": model, "optimizer": more}, strict=False)
    assert by_name(model, more) == {**want, "1.weight": by_name(model, more)["1.weight"], "1.bias": kept}
    assert more.param_groups[0]["lr"] == 0.3


def test_an_optimizer_of_another_layout_is_refused(tmp_path):
    class Other(Wrapped):
        def state_dict(self):
            return {"momentum": torch.ones(1)}

    with pytest.raises(CheckpointError, match=r"not the layout of torch\.optim"):
        save_checkpoint(tmp_path / "c", {"optimizer": Other(torch.optim.SGD([nn.Parameter(torch.ones(1))]))})


def test_state_that_fits_is_written_over_in_place(tmp_path):
    """So that loading needs no second copy of the state, and graphs that captured its tensors stay right."""
    net = nn.Linear(3, 2)
    opt = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    opt.step()
    save_checkpoint(tmp_path / "c", {"net": net, "opt": opt})
    before = {key: value.clone() for key, value in opt.state[net.weight].items()}
    held = dict(opt.state[net.weight])
    opt.step()
    load_checkpoint(tmp_path / "c", {"net": net, "opt": opt})
    for key, value in opt.state[net.weight].items():
        assert value is held[key], key
        assert torch.equal(value, before[key])
