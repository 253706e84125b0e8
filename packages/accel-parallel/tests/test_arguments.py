"""What a loop passes by mistake is named, by every entry of the engine and by the functions used alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_parallel import (
    Accumulation,
    NativeEngine,
    Plan,
    PlanContext,
    clip_grad_norm_,
    clip_grad_value_,
    join_uneven_inputs,
    no_sync,
    trigger_sync_in_backward,
)
from accel_state import GradientState
from accel_state.errors import NotPreparedError, PlanError


@pytest.fixture
def engine() -> NativeEngine:
    return NativeEngine(Plan([]), PlanContext(device=torch.device("cpu")))


MODEL = nn.Sequential(nn.Linear(2, 2))
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), 0.1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda engine: engine.backward(3.0), r"got 3\.0 of type float: leave \.item\(\)"),
        (lambda engine: engine.clip_grad_norm_(MODEL, 1.0), r"type Sequential.*pass model\.parameters\(\)"),
        (lambda engine: engine.clip_grad_norm_(OPTIMIZER, 1.0), r"type SGD.*pass model\.parameters\(\)"),
        (lambda engine: engine.clip_grad_norm_(None, 1.0), "type NoneType"),
        (lambda engine: engine.clip_grad_norm_(MODEL.parameters(), -1.0), r"max_norm=-1\.0.*at least 0"),
        (lambda engine: engine.clip_grad_norm_(MODEL.parameters(), "1"), "max_norm='1'"),
        (lambda engine: engine.clip_grad_value_(MODEL.parameters(), None), "clip_value=None"),
        (lambda _: clip_grad_norm_(MODEL.parameters(), float("nan")), "max_norm=nan"),
        (lambda _: clip_grad_value_("weights", 1.0), "type str"),
        (lambda _: no_sync(3), "no_sync takes models.*got 3"),
        (lambda _: trigger_sync_in_backward(3).__enter__(), "trigger_sync_in_backward takes models.*got 3"),
        (lambda _: join_uneven_inputs(MODEL).__enter__(), "takes a list of models"),
        (lambda _: Accumulation(GradientState()).block((3,)), "accumulate takes models.*got 3"),
    ],
)
def test_a_mistake_in_the_loop_is_named(engine, call, said):
    with pytest.raises(PlanError, match=said):
        call(engine)


@pytest.mark.parametrize("optimizer", [OPTIMIZER, "adam"])
def test_only_prepared_optimizers_are_unscaled_with_a_scaler_or_without(engine, optimizer):
    with pytest.raises(NotPreparedError, match="that was not prepared"):
        engine.unscale_gradients(optimizer)
