import gc
import weakref

import pytest
import torch
from torch import nn

from accel_parallel import Accumulation, GradientAccumulationPlugin
from accel_state import GradientState
from accel_state.errors import PlanError, SettingError


class Loader:
    """The part of a prepared loader that accumulation reads."""

    def __init__(self, batches: int, state: GradientState) -> None:
        self.batches, self.state = batches, state
        self.end_of_dataloader, self.remainder = False, -1

    def __iter__(self):
        self.state._add_dataloader(self)
        try:
            for index in range(self.batches):
                self.end_of_dataloader = index == self.batches - 1
                yield index
        finally:
            self.end_of_dataloader = False
            self.state._remove_dataloader(self)


def make(**options):
    state = GradientState(GradientAccumulationPlugin(**options))
    return Accumulation(state), state


def flags(accumulation, state, loader, *models):
    out = []
    for _ in loader:
        with accumulation.block(models):
            out.append(state.sync_gradients)
    return out


def test_every_third_micro_batch_is_an_update():
    accumulation, state = make(num_steps=3)
    assert flags(accumulation, state, range(7), nn.Linear(1, 1)) == [False, False, True] * 2 + [False]


def test_one_step_is_always_an_update():
    accumulation, state = make(num_steps=1)
    assert flags(accumulation, state, range(3), nn.Linear(1, 1)) == [True] * 3


def test_the_last_batch_of_a_loader_ends_the_window_and_the_next_begins_anew():
    accumulation, state = make(num_steps=3)
    model, loader = nn.Linear(1, 1), Loader(5, state)
    for _ in range(2):
        assert flags(accumulation, state, loader, model) == [False, False, True, False, True]


def test_windows_may_cross_the_loaders_end():
    accumulation, state = make(num_steps=3, sync_with_dataloader=False)
    model, loader = nn.Linear(1, 1), Loader(4, state)
    assert flags(accumulation, state, loader, model) == [False, False, True, False]
    assert flags(accumulation, state, loader, model) == [False, True, False, False]


def test_two_models_each_in_its_block_keep_windows_of_their_own():
    accumulation, state = make(num_steps=2)
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    seen = {one: [], two: []}
    for _ in Loader(8, state):
        for model in (one, two):
            with accumulation.block((model,)):
                seen[model].append(state.sync_gradients)
    assert seen[one] == seen[two] == [False, True] * 4


def test_two_models_in_one_block_share_a_window():
    accumulation, state = make(num_steps=2)
    assert flags(accumulation, state, range(4), nn.Linear(1, 1), nn.Linear(1, 1)) == [False, True] * 2


def test_the_flag_stays_readable_after_the_block():
    accumulation, state = make(num_steps=2)
    with accumulation.block((nn.Linear(1, 1),)):
        assert not state.sync_gradients
    assert not state.sync_gradients


def test_the_number_of_steps_can_change_while_training():
    accumulation, state = make(num_steps=2)
    model = nn.Linear(1, 1)
    assert flags(accumulation, state, range(2), model) == [False, True]
    state.plugin_kwargs["num_steps"] = 3
    assert flags(accumulation, state, range(3), model) == [False, False, True]


def test_an_exception_passes_and_the_next_window_goes_on():
    accumulation, state = make(num_steps=2)
    model = nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match="bad batch"), accumulation.block((model,)):
        raise RuntimeError("bad batch")
    assert flags(accumulation, state, range(2), model) == [True, False]


def test_reset_begins_anew_and_lets_models_go():
    accumulation, state = make(num_steps=2)
    model = nn.Linear(1, 1)
    alive = weakref.ref(model)
    flags(accumulation, state, range(1), model)
    accumulation.reset()
    assert state.sync_gradients
    assert flags(accumulation, state, range(2), model) == [False, True]
    gc.collect()
    gc.disable()
    try:
        accumulation.reset()
        del model
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("num_steps", [0, -1, 1.5, True, "2"])
def test_steps_that_are_no_count_are_refused(num_steps):
    with pytest.raises(SettingError, match=r"num_steps=.*whole number from 1"):
        GradientAccumulationPlugin(num_steps=num_steps)


def test_steps_left_open_come_from_the_environment_and_are_passed_on(monkeypatch):
    assert GradientAccumulationPlugin().to_kwargs() == {"num_steps": 1}
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    plugin = GradientAccumulationPlugin(sync_each_batch=True)
    assert plugin.to_kwargs() == {"num_steps": 4, "sync_each_batch": True}
    assert GradientState(plugin).num_steps == 4


def test_micro_batches_sum_to_the_mean_gradient():
    accumulation, state = make(num_steps=4)
    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    for part in x.chunk(4):
        with accumulation.block((model,)):
            (model(part).pow(2).mean() / state.num_steps).backward()
    summed = model.weight.grad.clone()
    model.zero_grad()
    model(x).pow(2).mean().backward()
    assert torch.allclose(summed, model.weight.grad, atol=1e-6)


def test_slices_of_the_last_batch_are_refused_or_counted_by_choice():
    model = nn.Linear(1, 1)
    accumulation, state = make(num_steps=2)
    loader = Loader(2, state)

    def run():
        out = []
        for _ in loader:
            for _slice in range(4):
                with accumulation.block((model,)):
                    out.append(state.sync_gradients)
        return out

    with pytest.raises(PlanError, match="second accumulate block of the same models in the last batch"):
        run()
    loader.__init__(1, state)
    assert flags(accumulation, state, loader, model) == flags(accumulation, state, loader, model) == [True]

    accumulation, state = make(num_steps=2, sync_with_dataloader=False)
    loader = Loader(2, state)
    assert run() == [False, True] * 4
    accumulation, state = make(num_steps=1)
    loader = Loader(2, state)
    assert run() == [True] * 8
