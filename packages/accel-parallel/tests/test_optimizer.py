import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from accel_parallel import AcceleratedOptimizer, GradientAccumulationPlugin, move_to_device
from accel_parallel.optimizer import place_state
from accel_state import GradientState
from accel_state.errors import PrecisionError


def state_of(num_steps: int = 1) -> GradientState:
    return GradientState(GradientAccumulationPlugin(num_steps=num_steps))


def trained(lr: float = 0.5, scaler=None, kind=torch.optim.SGD, **options):
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    return layer, AcceleratedOptimizer(
        kind(layer.parameters(), lr=lr, **options), scaler=scaler, gradient_state=state_of()
    )


def backward(layer, scaler=None, x: float = 1.0):
    loss = layer(torch.full((1, 1), x)).sum()
    (loss if scaler is None else scaler.scale(loss)).backward()


def scaler_of(scale: float = 4.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100)


def test_inside_a_window_nothing_happens():
    layer, optimizer = trained()
    backward(layer)
    optimizer.gradient_state.sync_gradients = False
    optimizer.step()
    optimizer.zero_grad()
    assert (layer.weight.item(), layer.weight.grad.item()) == (1.0, 1.0)
    optimizer.gradient_state.sync_gradients = True
    optimizer.step()
    optimizer.zero_grad()
    assert (layer.weight.item(), layer.weight.grad) == (0.5, None)


def test_a_closure_is_evaluated_once_and_its_value_comes_back():
    layer, optimizer = trained()
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = layer(torch.ones(1, 1)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.0
    optimizer.gradient_state.sync_gradients = False
    assert optimizer.step(closure) is None
    assert (len(calls), layer.weight.item()) == (1, 0.5)


def test_zero_grad_passes_its_argument_on_and_refuses_it_where_unknown():
    layer, optimizer = trained()
    backward(layer)
    optimizer.zero_grad(set_to_none=False)
    assert layer.weight.grad.item() == 0.0

    class Old(torch.optim.SGD):
        def zero_grad(self):
            for group in self.param_groups:
                group["params"][0].grad = None

    layer, optimizer = trained(kind=Old)
    backward(layer)
    with pytest.raises(TypeError, match=r"Old\.zero_grad does not take set_to_none=True"):
        optimizer.zero_grad(set_to_none=True)
    optimizer.zero_grad()
    assert layer.weight.grad is None


def test_it_is_an_optimizer_for_torch():
    layer, optimizer = trained(lr=1.0, momentum=0.9)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    backward(layer)
    optimizer.step()
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert optimizer.state is optimizer.optimizer.state
    assert optimizer.defaults["momentum"] == 0.9
    other = nn.Linear(1, 1)
    optimizer.add_param_group({"params": list(other.parameters()), "lr": 2.0})
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.1), 2.0]


def test_setters_reach_the_inner_optimizer():
    _, optimizer = trained()
    groups, state, defaults = [], {}, {}
    optimizer.param_groups, optimizer.state, optimizer.defaults = groups, state, defaults
    inner = optimizer.optimizer
    assert inner.param_groups is groups
    assert inner.state is state
    assert inner.defaults is defaults


def test_a_scheduler_on_the_inner_optimizer_sees_its_steps():
    layer, optimizer = trained(lr=1.0)
    scheduler = StepLR(optimizer.optimizer, step_size=1, gamma=0.5)
    backward(layer)
    optimizer.step()
    scheduler.step()  # would warn, which is an error here, had torch not seen the step
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_state_dict_is_the_inner_ones():
    layer, optimizer = trained(momentum=0.9)
    backward(layer)
    optimizer.step()
    saved = optimizer.state_dict()
    _, other = trained(momentum=0.9)
    other.load_state_dict(saved)
    assert torch.equal(other.state_dict()["state"][0]["momentum_buffer"], saved["state"][0]["momentum_buffer"])


def test_hooks_are_the_inner_ones():
    layer, optimizer = trained(momentum=0.9)
    seen = []
    handles = [
        optimizer.register_step_pre_hook(lambda *a: seen.append("pre")),
        optimizer.register_step_post_hook(lambda *a: seen.append("post")),
        optimizer.register_state_dict_pre_hook(lambda *a: seen.append("save")),
        optimizer.register_state_dict_post_hook(lambda *a: seen.append("saved")),
        optimizer.register_load_state_dict_pre_hook(lambda *a: seen.append("load")),
        optimizer.register_load_state_dict_post_hook(lambda *a: seen.append("loaded")),
    ]
    backward(layer)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["pre", "post", "save", "saved", "load", "loaded"]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(seen) == 6


def test_train_and_eval_reach_schedule_free_optimizers():
    class ScheduleFree(torch.optim.SGD):
        mode = "train"

        def train(self):
            self.mode = "train"

        def eval(self):
            self.mode = "eval"

    _, optimizer = trained(kind=ScheduleFree)
    optimizer.eval()
    assert optimizer.mode == "eval"
    optimizer.train()
    assert optimizer.optimizer.mode == "train"
    _, plain = trained()
    plain.eval()
    with pytest.raises(AttributeError, match="mode"):
        _ = plain.mode


# ---- with a loss scaler


def test_scaled_gradients_give_the_unscaled_step():
    scaler = scaler_of()
    layer, optimizer = trained(scaler=scaler)
    backward(layer, scaler)
    optimizer.step()
    assert layer.weight.item() == 0.5
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_noticed_and_the_next_update_is_not_affected(fused):
    scaler = scaler_of()
    options = {"fused": True} if fused else {}
    layer, optimizer = trained(scaler=scaler, kind=torch.optim.Adam, **options)
    backward(layer, scaler, x=float("inf"))
    optimizer.step()
    assert optimizer.step_was_skipped
    assert layer.weight.item() == 1.0
    optimizer.zero_grad()
    backward(layer, scaler)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert layer.weight.item() == pytest.approx(0.5)


def test_gradients_are_unscaled_once_per_update_and_never_inside_a_window():
    scaler = scaler_of()
    layer, optimizer = trained(scaler=scaler)
    backward(layer, scaler)
    optimizer.gradient_state.sync_gradients = False
    optimizer.unscale_gradients()
    assert layer.weight.grad.item() == 4.0
    optimizer.gradient_state.sync_gradients = True
    optimizer.unscale_gradients()
    optimizer.unscale_gradients()
    assert layer.weight.grad.item() == 1.0
    optimizer.step()
    assert layer.weight.item() == 0.5


def test_gradients_thrown_away_after_unscaling_do_not_spoil_the_next_update():
    scaler = scaler_of()
    layer, optimizer = trained(scaler=scaler)
    backward(layer, scaler)
    optimizer.unscale_gradients()
    optimizer.zero_grad()
    backward(layer, scaler)
    optimizer.unscale_gradients()
    assert layer.weight.grad.item() == 1.0
    optimizer.step()
    assert layer.weight.item() == 0.5


def test_a_closure_with_a_scaler_is_refused():
    layer, optimizer = trained(scaler=scaler_of())
    with pytest.raises(PrecisionError, match="cannot be combined with a loss scaler"):
        optimizer.step(lambda: layer(torch.ones(1, 1)))


def test_any_object_with_four_methods_is_a_scaler():
    class Doubler:
        log: list

        def __init__(self):
            self.log = []

        def scale(self, loss):
            return loss * 2

        def unscale_(self, optimizer):
            self.log.append("unscale")

        def step(self, optimizer):
            self.log.append("step")
            return optimizer.step()

        def update(self):
            self.log.append("update")

    scaler = Doubler()
    layer, optimizer = trained(scaler=scaler)
    backward(layer, scaler)
    optimizer.unscale_gradients()
    optimizer.step()
    assert scaler.log == ["unscale", "step", "update"]
    assert not optimizer.step_was_skipped


# ---- copies and lifetimes


def test_pickles_with_state_and_keeps_counting_skipped_steps():
    scaler = scaler_of()
    layer, optimizer = trained(scaler=scaler, momentum=0.9)
    backward(layer, scaler)
    optimizer.step()
    optimizer.gradient_state.plugin_kwargs["num_steps"] = 3
    other, state = pickle.loads(pickle.dumps((optimizer, optimizer.gradient_state)))
    assert other.gradient_state is state, "what is pickled together stays together"
    assert (state.num_steps, state.sync_gradients) == (3, True)
    (weight,) = other.param_groups[0]["params"]
    (other.scaler.scale(weight.sum()) * float("inf")).backward()
    other.step()
    assert other.step_was_skipped


def test_a_deep_copy_shares_the_run_and_owns_its_state():
    layer, optimizer = trained(momentum=0.9)
    state_of()
    other = copy.deepcopy(optimizer)
    assert other.gradient_state is optimizer.gradient_state
    assert other.optimizer is not optimizer.optimizer
    assert other.param_groups[0]["params"][0] is not layer.weight


@pytest.mark.parametrize("with_scaler", [False, True])
def test_dropping_it_frees_it_without_the_collector(with_scaler):
    gc.collect()
    gc.disable()
    try:
        scaler = scaler_of() if with_scaler else None
        layer, optimizer = trained(scaler=scaler)
        backward(layer, scaler)
        optimizer.step()
        alive = [weakref.ref(optimizer), weakref.ref(optimizer.optimizer)]
        del optimizer
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


def test_step_looks_nothing_up(monkeypatch):
    layer, optimizer = trained()
    backward(layer)

    def refuse(*args, **kwargs):
        raise AssertionError("signatures are for construction")

    monkeypatch.setattr(inspect, "signature", refuse)
    optimizer.step()
    optimizer.zero_grad()


def test_state_moves_to_its_parameters_and_step_counts_stay():
    layer = nn.Linear(2, 1, bias=False, device="meta")
    inner = torch.optim.Adam(layer.parameters())
    inner.state[layer.weight] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(1, 2), "exp_avg_sq": torch.ones(1, 2)}
    place_state(inner)
    state = inner.state[layer.weight]
    assert {name: value.device.type for name, value in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


def test_move_to_device_keeps_the_nesting():
    tree = {"a": [torch.ones(1), 3], "b": (torch.ones(1),)}
    moved = move_to_device(tree, torch.device("meta"))
    assert moved["a"][0].device.type == moved["b"][0].device.type == "meta"
    assert moved["a"][1] == 3
    assert tree["a"][0].device.type == "cpu"


def test_a_step_of_another_kind_counts_as_one():
    from accel_parallel import patch_optimizer_step

    model = nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = AcceleratedOptimizer(inner, scaler=torch.amp.GradScaler("cpu"))
    wrapped._record.ran = False
    assert wrapped.step_was_skipped
    assert patch_optimizer_step(wrapped, lambda value: value + 1)(1) == 2
    assert not wrapped.step_was_skipped
