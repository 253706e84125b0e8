from dataclasses import dataclass

import pytest
import torch
from torch import nn

from accel_parallel import SLOTS, Plan, PlanContext, ddp, single
from accel_state.errors import PlanError

CPU = PlanContext(device=torch.device("cpu"))


@dataclass
class Note:
    """A step by shape alone, which writes its name into the model."""

    name: str
    slot: str
    needs: frozenset = frozenset()
    gives: frozenset = frozenset()
    complaint: str = ""

    def check(self, model, context):
        return [self.complaint] if self.complaint else []

    def apply(self, model, context):
        model.notes = [*getattr(model, "notes", []), self.name]
        return model

    def describe(self, model, context):
        return f"writes {self.name}"


def test_steps_run_in_order_on_any_object_of_the_right_shape():
    model = Plan([single(), Note("tp", "tp"), Note("compile", "compile")]).apply(nn.Linear(1, 1), CPU)
    assert model.notes == ["tp", "compile"]


def test_every_slot_in_order_is_a_plan_and_any_swap_is_not():
    steps = [Note(slot, slot) for slot in SLOTS]
    Plan(steps)
    for left, right in zip(range(len(steps)), range(1, len(steps)), strict=False):
        swapped = steps.copy()
        swapped[left], swapped[right] = swapped[right], swapped[left]
        with pytest.raises(PlanError, match=f"{SLOTS[left]} comes after {SLOTS[right]}.*move it forward"):
            Plan(swapped)


def test_two_steps_for_one_place_are_refused():
    with pytest.raises(PlanError, match="fsdp and ddp both take the slot 'data_parallel'"):
        Plan([single(), ddp(), Note("fsdp", "data_parallel")])


def test_an_unknown_place_is_refused():
    with pytest.raises(PlanError, match=r"odd wants the unknown slot 'nowhere': use one of \['pp'"):
        Plan([Note("odd", "nowhere")])


def test_what_a_step_needs_has_to_be_given_before():
    with pytest.raises(PlanError, match=r"ddp needs placed, which no earlier step gives: add single\(\) at the start"):
        Plan([ddp()])
    needy = Note("needy", "tp", needs=frozenset({"shape"}))
    giver = Note("giver", "compile", gives=frozenset({"shape"}))
    with pytest.raises(PlanError, match=r"needy needs shape.*move giver before it"):
        Plan([needy, giver])
    with pytest.raises(PlanError, match=r"needy needs shape.*add the step that does"):
        Plan([needy])


def test_all_complaints_come_at_once_and_the_model_is_untouched():
    plan = Plan(
        [Note("one", "tp"), Note("two", "compile", complaint="too big"), Note("three", "autocast", complaint="odd")]
    )
    model = nn.Linear(1, 1)
    with pytest.raises(PlanError, match=r"(?s)- two: too big.*- three: odd"):
        plan.apply(model, CPU)
    assert not hasattr(model, "notes")


def test_explain_reads_as_a_table():
    plan = Plan([single(), Note("tp", "tp")])
    assert plan.explain(nn.Linear(100, 100), CPU).splitlines() == [
        "on cpu, 1 rank:",
        "1.  single  placement  parameters and buffers (40.4 kB) on cpu",
        "2.  tp      tp         writes tp",
    ]
    assert plan.explain().splitlines()[1] == "1.  single  placement  parameters and buffers on cpu"
    assert Plan([]).explain() == "no steps: the model stays as it is"
    assert repr(plan) == "Plan([single, tp])"


def test_ddp_says_what_it_sends():
    two = PlanContext(device=torch.device("cpu"), world_size=4)
    line = Plan([single(), ddp()]).explain(nn.Linear(1000, 1000, bias=False), two).splitlines()[2]
    assert line.endswith("gradients (4.0 MB) averaged over 4 ranks during backward, 6.0 MB sent per rank and update")
    assert "averaged over all ranks" in ddp().describe(None, two)


def test_ddp_without_a_process_group_is_refused():
    with pytest.raises(PlanError, match="ddp: there is no process group: start the script by a launcher"):
        Plan([single(), ddp()]).apply(nn.Linear(1, 1), CPU)


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(PlanError, match=r"2 parameters are on the meta device.*weight is the first.*to_empty"):
        Plan([single()]).apply(model, CPU)


def test_a_model_spread_over_devices_trains_on_one_rank_only():
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].hf_device_map = {"a": 0, "b": "cpu"}
    weight = model[0].weight
    somewhere = PlanContext(device=torch.device("meta"))
    assert Plan([single()]).apply(model, somewhere)[0].weight is weight  # nothing is moved
    two = PlanContext(device=torch.device("cpu"), world_size=2)
    with pytest.raises(PlanError, match=r"on 0, cpu, and 2 ranks train one copy each"):
        Plan([single()]).apply(model, two)


def test_single_keeps_the_model_itself():
    model = nn.Linear(1, 1)
    assert Plan([single()]).apply(model, CPU) is model
