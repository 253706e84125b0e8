import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from accel_parallel import (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    Accumulation,
    GradientAccumulationPlugin,
    NativeEngine,
    Plan,
    PlanContext,
    Prepared,
    single,
)
from accel_state import GradientState
from accel_state.errors import NotPreparedError

CPU = PlanContext(device=torch.device("cpu"))


def engine_of(num_steps: int = 1, **options) -> NativeEngine:
    state = GradientState(GradientAccumulationPlugin(num_steps=num_steps))
    return NativeEngine(Plan([single()]), CPU, gradient_state=state, **options)


def line(value: float = 1.0, inputs: int = 1) -> nn.Linear:
    layer = nn.Linear(inputs, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def sgd(*layers, lr: float = 0.5):
    return torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=lr)


def scaler_of(scale: float = 4.0):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100)


def test_objects_come_back_in_their_places_wrapped():
    engine, layer = engine_of(), line()
    inner = sgd(layer)
    schedule = StepLR(inner, 1)
    out = engine.prepare(Prepared(models=(layer,), optimizers=(inner,), schedulers=(schedule,)))
    assert out.models == (layer,)
    assert out.optimizers[0].optimizer is inner
    assert out.schedulers[0].scheduler is schedule
    assert out.schedulers[0].optimizers == [out.optimizers[0]]


def test_preparing_twice_is_preparing_once():
    engine, layer = engine_of(), line()
    inner = sgd(layer)
    once = engine.prepare(Prepared(models=(layer,), optimizers=(inner,), schedulers=(StepLR(inner, 1),)))
    assert engine.prepare(once) == once
    assert len(engine.optimizers) == 1


def test_schedulers_find_their_own_optimizer_in_separate_calls():
    engine, layers = engine_of(), [line(), line()]
    inners = [sgd(layer) for layer in layers]
    (first,) = engine.prepare(Prepared(optimizers=(inners[0],))).optimizers
    (second,) = engine.prepare(Prepared(optimizers=(inners[1],))).optimizers
    own, on_wrapper = engine.prepare(Prepared(schedulers=(StepLR(inners[1], 1), StepLR(first, 1)))).schedulers
    assert own.optimizers == [second]
    assert on_wrapper.optimizers == [first]

    class Loose:
        def step(self):
            return None

    assert engine.prepare_scheduler(Loose()).optimizers == [first, second]


def test_scheduler_options_are_passed_on():
    engine = NativeEngine(
        Plan([single()]),
        PlanContext(device=torch.device("cpu"), world_size=4),
        gradient_state=GradientState(GradientAccumulationPlugin(num_steps=1)),
        scheduler_unit="update",
    )
    inner = sgd(line())
    schedule = engine.prepare_scheduler(StepLR(inner, 1, gamma=0.5))
    inner.step()
    schedule.step()
    assert inner.param_groups[0]["lr"] == 0.25


def test_no_model_changes_if_one_is_refused():
    class Refusing:
        name, slot, needs, gives = "odd", "tp", frozenset(), frozenset()
        applied: list

        def __init__(self):
            self.applied = []

        def check(self, model, context):
            return ["too wide"] if model.in_features > 1 else []

        def apply(self, model, context):
            self.applied.append(model)
            return model

        def describe(self, model, context):
            return "odd"

    step = Refusing()
    engine = NativeEngine(Plan([step]), CPU, gradient_state=GradientState())
    with pytest.raises(ValueError, match="odd: too wide"):
        engine.prepare(Prepared(models=(line(), line(inputs=2))))
    assert step.applied == []


def test_backward_divides_by_the_steps_also_in_a_ragged_window():
    engine, layer = engine_of(num_steps=4), line()
    for x in (1.0, 2.0, 5.0):
        engine.backward(layer(torch.full((1, 1), x)).sum())
    assert layer.weight.grad.item() == 2.0


def test_backward_passes_arguments_on():
    engine, layer = engine_of(), line()
    loss = layer(torch.ones(1, 1)).sum()
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    assert layer.weight.grad.item() == 2.0


def test_clipping_inside_a_window_changes_nothing_and_tells_the_norm_so_far():
    engine, layer = engine_of(num_steps=2, scaler=scaler_of()), line(inputs=2)
    (optimizer,) = engine.prepare(Prepared(optimizers=(sgd(layer, lr=1.0),))).optimizers
    accumulation = Accumulation(engine.gradient_state)
    norms = []
    for x in ([3.0, 0.0], [0.0, 5.0], [0.25, 0.0], [0.25, 0.5]):
        with accumulation.block((layer,)):
            engine.backward(layer(torch.tensor([x])).sum())
            norms.append(engine.clip_grad_norm_(layer.parameters(), 1.0).item())
            engine.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    whole = (1.5**2 + 2.5**2) ** 0.5
    assert norms == pytest.approx([1.5, whole, 0.125, (0.25**2 + 0.25**2) ** 0.5], rel=1e-3)
    assert layer.weight[0].tolist() == pytest.approx([1 - 1.5 / whole - 0.25, 1 - 2.5 / whole - 0.25], rel=1e-4)


def test_clipping_one_model_leaves_the_others_optimizer_waiting():
    engine, one, two = engine_of(scaler=scaler_of()), line(), line()
    first, second = engine.prepare(Prepared(optimizers=(sgd(one), sgd(two)))).optimizers
    engine.backward(one(torch.ones(1, 1)).sum())
    engine.clip_grad_norm_(one.parameters(), 10.0)
    first.step()
    engine.backward(two(torch.ones(1, 1)).sum())
    engine.clip_grad_value_(two.parameters(), 0.5)
    second.step()
    assert (one.weight.item(), two.weight.item()) == (0.5, 0.75)


def test_values_are_not_clamped_inside_a_window():
    engine, layer = engine_of(), line()
    engine.backward(layer(torch.full((1, 1), 3.0)).sum())
    engine.gradient_state.sync_gradients = False
    engine.clip_grad_value_(layer.weight, 1.0)
    assert layer.weight.grad.item() == 3.0
    engine.gradient_state.sync_gradients = True
    engine.clip_grad_value_(layer.weight, 1.0)
    assert layer.weight.grad.item() == 1.0


@pytest.mark.parametrize("form", ["one", "list", "all"])
def test_unscaling_one_several_or_all(form):
    engine, layer = engine_of(scaler=scaler_of()), line()
    (optimizer,) = engine.prepare(Prepared(optimizers=(sgd(layer),))).optimizers
    engine.backward(layer(torch.ones(1, 1)).sum())
    engine.unscale_gradients({"one": optimizer, "list": [optimizer], "all": None}[form])
    engine.unscale_gradients()
    assert layer.weight.grad.item() == 1.0


def test_without_a_scaler_unscaling_does_nothing():
    engine, layer = engine_of(), line()
    engine.prepare(Prepared(optimizers=(sgd(layer),)))
    engine.backward(layer(torch.ones(1, 1)).sum())
    engine.unscale_gradients()
    assert layer.weight.grad.item() == 1.0


def test_an_overflow_moves_neither_weights_nor_schedule():
    engine, layer = engine_of(scaler=scaler_of()), line()
    inner = sgd(layer)
    schedule = StepLR(inner, 1, gamma=0.5)
    out = engine.prepare(Prepared(optimizers=(inner,), schedulers=(schedule,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (1.0, float("inf"), 1.0):
            engine.backward(layer(torch.full((1, 1), x)).sum())
            out.optimizers[0].step()
            out.schedulers[0].step()
            out.optimizers[0].zero_grad()
    assert layer.weight.item() == 0.25  # 1 - 0.5 - 0.25
    assert inner.param_groups[0]["lr"] == 0.125


def test_the_state_is_what_a_checkpoint_holds():
    engine = engine_of(scaler=scaler_of())
    layers = (line(), line())
    inner = sgd(*layers)
    schedule = StepLR(inner, 1)
    state = engine.state(engine.prepare(Prepared(models=layers, optimizers=(inner,), schedulers=(schedule,))))
    assert {name: type(item) for name, item in state.items()} == {
        "Linear-0": nn.Linear,
        "Linear-1": nn.Linear,
        "SGD-0": torch.optim.SGD,
        "StepLR-0": StepLR,
        "GradScaler-0": torch.amp.GradScaler,
    }
    assert state["Linear-1"] is layers[1]


def test_everything_is_freed_without_the_collector():
    gc.collect()
    gc.disable()
    try:
        engine, layer = engine_of(), line()
        out = engine.prepare(Prepared(models=(layer,), optimizers=(sgd(layer),)))
        accumulation = Accumulation(engine.gradient_state)
        with accumulation.block(out.models):
            engine.backward(layer(torch.ones(1, 1)).sum())
            out.optimizers[0].step()
        alive = [weakref.ref(item) for item in (layer, out.optimizers[0], engine, engine.gradient_state, accumulation)]
        del engine, layer, out, accumulation
        assert [ref() for ref in alive] == [None] * 5
    finally:
        gc.enable()


def test_release_lets_optimizers_go():
    engine, layer = engine_of(), line()
    optimizer = engine.prepare_optimizer(sgd(layer))
    assert isinstance(optimizer, AcceleratedOptimizer)
    engine.release()
    assert engine.optimizers == []
    assert isinstance(engine.prepare_scheduler(StepLR(optimizer.optimizer, 1)), AcceleratedScheduler)


def test_gradients_are_unscaled_for_one_optimizer_several_or_all_at_most_once():
    engine, layers = engine_of(scaler=scaler_of(4.0)), [line(), line(), line()]
    inner = [sgd(layer) for layer in layers]
    wrapped = engine.prepare(Prepared(models=tuple(layers), optimizers=tuple(inner))).optimizers
    for layer in layers:
        engine.backward(layer(torch.ones(1, 1)).sum())
    seen = []
    for chosen in (wrapped[0], [inner[0], wrapped[1]], None, None):
        engine.unscale_gradients(chosen)
        seen.append([layer.weight.grad.item() for layer in layers])
    assert seen == [[1.0, 4.0, 4.0], [1.0, 1.0, 4.0], [1.0] * 3, [1.0] * 3]
    with pytest.raises(NotPreparedError, match="got a SGD that was not prepared"):
        engine.unscale_gradients(sgd(line()))


def test_the_norm_inside_a_window_needs_no_look_at_the_scale():
    scaler = scaler_of(8.0)
    scaler.get_scale = None  # would wait for the device
    engine, layer = engine_of(2, scaler=scaler), line()
    accumulation = Accumulation(engine.gradient_state)
    engine.prepare(Prepared(models=(layer,), optimizers=(sgd(layer),)))
    with accumulation.block((layer,)):
        engine.backward(layer(torch.full((1, 1), 6.0)).sum())
        assert engine.clip_grad_norm_(layer.parameters(), 1.0).item() == 3.0
        assert layer.weight.grad.item() == 24.0, "scaled, halved by the two steps, and not clipped"
