import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from accel_parallel import AcceleratedOptimizer, AcceleratedScheduler, GradientAccumulationPlugin
from accel_state import GradientState


def make(make_inner=None, **options):
    layer = nn.Linear(1, 1, bias=False)
    state = GradientState(GradientAccumulationPlugin(num_steps=2))
    optimizer = AcceleratedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), gradient_state=state)
    inner = (make_inner or (lambda o: StepLR(o, step_size=1, gamma=0.5)))(optimizer.optimizer)
    options.setdefault("num_processes", 1)
    scheduler = AcceleratedScheduler(inner, optimizer, gradient_state=state, **options)
    optimizer.step()
    return scheduler, optimizer, state


def lr(optimizer) -> float:
    return optimizer.param_groups[0]["lr"]


def test_one_notch_per_update():
    scheduler, optimizer, _ = make()
    scheduler.step()
    assert lr(optimizer) == 0.5 == scheduler.get_last_lr()[0]


def test_micro_steps_do_not_move_it():
    scheduler, optimizer, state = make()
    state.sync_gradients = False
    scheduler.step()
    assert lr(optimizer) == 1.0


def test_a_skipped_update_does_not_move_it():
    scheduler, optimizer, _ = make()

    class Skipped:
        step_was_skipped = True

    scheduler.optimizers = [optimizer, Skipped()]
    scheduler.step()
    assert lr(optimizer) == 1.0


def test_detached_from_the_optimizer_each_call_is_one_notch():
    scheduler, optimizer, state = make(step_with_optimizer=False, num_processes=4)
    scheduler.step()
    state.sync_gradients = False
    scheduler.step()
    assert lr(optimizer) == 0.25


def test_the_peers_default_moves_once_per_process_and_says_so():
    with pytest.warns(UserWarning, match="moves 4 notches per update.*4 processes.*per='update'") as warned:
        scheduler, optimizer, _ = make(num_processes=4)
    assert warned[0].filename == __file__
    scheduler.step()
    assert lr(optimizer) == 1 / 16


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"per": "update"}, 0.5), ({"per": "sample"}, 1 / 16), ({"split_batches": True}, 0.5)],
)
def test_an_explicit_unit_is_silent(options, expected):
    scheduler, optimizer, _ = make(num_processes=4, **options)
    scheduler.step()
    assert lr(optimizer) == expected


def test_notches_of_other_processes_do_not_run_over_the_end():
    scheduler, _, _ = make(lambda o: OneCycleLR(o, max_lr=1.0, total_steps=6), num_processes=4, per="sample")
    for _ in range(3):
        scheduler.step()
    assert scheduler.scheduler.last_epoch == 6


def test_a_plan_counted_in_updates_may_not_run_over_the_end_silently():
    scheduler, _, _ = make(lambda o: OneCycleLR(o, max_lr=1.0, total_steps=2), num_processes=4, per="update")
    scheduler.step()
    scheduler.step()
    with pytest.raises(ValueError, match="total steps is 2"):
        scheduler.step()


def test_arguments_are_passed_on():
    scheduler, optimizer, _ = make(lambda o: ReduceLROnPlateau(o, patience=0, factor=0.1))
    scheduler.step(1.0)
    scheduler.step(metrics=2.0)
    assert lr(optimizer) == pytest.approx(0.1)


def test_units_that_cannot_have_an_effect_are_refused():
    with pytest.raises(ValueError, match="per='epoch' is not a unit"):
        make(per="epoch")
    with pytest.raises(ValueError, match="no effect with step_with_optimizer=False"):
        make(per="update", step_with_optimizer=False)


def test_state_and_attributes_are_the_inner_ones():
    scheduler, _, _ = make()
    scheduler.step()
    other, optimizer, _ = make()
    other.load_state_dict(scheduler.state_dict())
    other.step()
    assert other.last_epoch == 2
    assert other.base_lrs == [1.0]
    with pytest.raises(AttributeError, match="nothing"):
        _ = other.nothing
    assert lr(optimizer) == 0.5, "the loaded position does not rewrite the optimizer's rate; one notch on it does"


def test_get_lr_is_the_inner_ones():
    scheduler, _, _ = make(lambda o: LambdaLR(o, float))
    with pytest.warns(UserWarning, match="get_last_lr"):
        assert scheduler.get_lr() == [0.0]


def test_a_single_optimizer_or_several():
    scheduler, optimizer, _ = make()
    assert list(scheduler.optimizers) == [optimizer]


def test_copies_keep_unit_and_position():
    scheduler, _, state = make(num_processes=2, per="sample")
    scheduler.step()
    other, its_state = pickle.loads(pickle.dumps((scheduler, state)))
    assert other.gradient_state is its_state
    assert other.last_epoch == 2
    twin = copy.deepcopy(scheduler)
    assert twin.gradient_state is scheduler.gradient_state
    assert twin.scheduler is not scheduler.scheduler
