"""What an Accelerator is built from: argument, environment, default; contradictions; what is refused."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

import accel.accelerator
from accel import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from accel.refusals import MEMBERS
from accel_state import AcceleratorState, GradientState
from accel_state.errors import SettingError


def test_the_environment_counts_only_where_the_argument_was_not_given(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert Accelerator(cpu=True).gradient_accumulation_steps == 4
    assert Accelerator(cpu=True, gradient_accumulation_steps=1).gradient_accumulation_steps == 1
    assert Accelerator(cpu=True).mixed_precision == "bf16"
    assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"


def test_our_variable_beats_the_peers(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCEL_GRADIENT_ACCUMULATION_STEPS", "3")
    assert Accelerator(cpu=True).gradient_accumulation_steps == 3


def test_a_plugin_and_the_same_number_agree_and_another_number_does_not():
    plugin = GradientAccumulationPlugin(num_steps=2)
    assert Accelerator(cpu=True, gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 2
    agreeing = Accelerator(cpu=True, gradient_accumulation_steps=2, gradient_accumulation_plugin=plugin)
    assert agreeing.gradient_accumulation_steps == 2
    with pytest.raises(SettingError, match=r"gradient_accumulation_steps=3 contradicts .*num_steps=2"):
        Accelerator(cpu=True, gradient_accumulation_steps=3, gradient_accumulation_plugin=plugin)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "two"])
def test_accumulation_steps_that_are_not_allowed(steps):
    with pytest.raises(SettingError, match="gradient_accumulation_steps"):
        Accelerator(cpu=True, gradient_accumulation_steps=steps)


def test_an_unknown_precision_names_the_allowed_ones():
    with pytest.raises(ValueError, match=r"'bf17' is not allowed.*bf16"):
        Accelerator(cpu=True, mixed_precision="bf17")


@pytest.mark.parametrize(
    "argument",
    ["deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin"],
)
def test_what_cannot_be_honoured_is_refused_by_name(argument):
    with pytest.raises(SettingError, match=rf"Accelerator\({argument}='inductor'\) cannot be honoured.*Way out"):
        Accelerator(cpu=True, **{argument: "inductor"})


def test_no_compilation_asks_for_nothing():
    assert Accelerator(cpu=True, dynamo_backend="no").num_processes == 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true"),
        ("ACCELERATE_USE_MEGATRON_LM", "true"),
    ],
)
def test_what_a_launcher_asks_for_is_refused_too(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingError, match=rf"environment {variable}.*cannot be honoured"):
        Accelerator(cpu=True)


def test_two_handlers_of_one_class_and_an_unknown_one_are_errors():
    with pytest.raises(SettingError, match="two AutocastKwargs"):
        Accelerator(cpu=True, kwargs_handlers=[AutocastKwargs(), AutocastKwargs(enabled=False)])
    with pytest.raises(SettingError, match="which nothing here reads"):
        Accelerator(cpu=True, kwargs_handlers=["autocast"])


def test_split_batches_is_deprecated_and_must_not_contradict():
    with pytest.warns(FutureWarning, match="DataLoaderConfiguration") as warned:
        assert Accelerator(cpu=True, split_batches=True).split_batches
    assert warned[0].filename == __file__
    with pytest.warns(FutureWarning), pytest.raises(SettingError, match="contradicts"):
        Accelerator(cpu=True, split_batches=True, dataloader_config=DataLoaderConfiguration())


def test_two_project_directories_contradict(tmp_path):
    with pytest.raises(SettingError, match="contradicts"):
        Accelerator(cpu=True, project_dir="a", project_config=ProjectConfiguration(project_dir="b"))
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    assert accelerator.project_dir == accelerator.logging_dir == str(tmp_path)


def test_accelerators_with_other_settings_live_side_by_side():
    first = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    second = Accelerator(cpu=True, gradient_accumulation_steps=3)
    assert (first.mixed_precision, second.mixed_precision) == ("bf16", "no")
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (2, 3)
    assert AcceleratorState() is second.state
    assert GradientState() is second.gradient_state


def test_explain_names_what_was_resolved():
    text = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2).explain()
    for part in ("rank 0 of 1 on cpu", "bf16 (argument)", "micro-batches per update: 2 (argument)", "autocast"):
        assert part in text


def test_explain_names_who_said_so(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    text = Accelerator(cpu=True).explain()
    assert "mixed precision: bf16 (environment ACCELERATE_MIXED_PRECISION)" in text
    assert "micro-batches per update: 1 (default)" in text


def test_the_facade_stays_small_enough_to_read():
    lines = len(Path(inspect.getfile(accel.accelerator)).read_text().splitlines())
    assert lines < 900


def test_cpu_ignores_every_accelerator():
    assert Accelerator(cpu=True).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"project_config": "runs"}, "give a ProjectConfiguration"),
        ({"dataloader_config": {}}, "give a DataLoaderConfiguration"),
        ({"gradient_accumulation_plugin": 4}, "give a GradientAccumulationPlugin"),
        ({"kwargs_handlers": AutocastKwargs()}, "give a list of handlers"),
        ({"rng_types": ["foo"]}, "generator"),
        ({"rng_types": "generator"}, "give a list"),
        ({"rng_types": 3}, "give a list"),
        ({"device_placement": "yes"}, "give True or False"),
        ({"step_scheduler_with_optimizer": None}, "give True or False"),
        ({"project_dir": 3}, "give a path"),
        ({"fsdp_plugin": {}}, "give a FullyShardedDataParallelPlugin"),
        ({"dynamo_plugin": "inductor"}, "give a TorchDynamoPlugin"),
        ({"parallelism_config": "tp=2"}, "give a ParallelismConfig"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused_by_name(arguments, said):
    (name,) = arguments
    with pytest.raises(SettingError, match=rf"{name}=.*{said}"):
        Accelerator(cpu=True, **arguments)


def test_cpu_takes_true_or_false():
    with pytest.raises(SettingError, match="cpu='no' is a str: give True or False"):
        Accelerator(cpu="no")


def test_a_limit_that_keeps_nothing_is_refused():
    with pytest.raises(ValueError, match="total_limit=0"):
        ProjectConfiguration(total_limit=0)


def test_what_is_not_offered_yet_says_so_and_counts_as_absent():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(AttributeError, match="'lomo_backward': accel does not offer it yet; it belongs to accel-p"):
        accelerator.lomo_backward()
    assert not hasattr(accelerator, "lomo_backward")
    with pytest.raises(AttributeError, match=r"has no attribute 'even'$"):
        accelerator.even  # noqa: B018
    assert not any(hasattr(Accelerator, name) for name in MEMBERS), "offered by now: leave it out of MEMBERS"


def test_values_without_effect_or_of_a_wrong_type_are_refused_where_they_are_given():
    with pytest.raises(ValueError, match=r"split_batches='x'.*True or False"):
        DataLoaderConfiguration(split_batches="x")
    with pytest.raises(ValueError, match="no effect without use_seedable_sampler"):
        DataLoaderConfiguration(data_seed=3)
    with pytest.raises(ValueError, match=r"timeout=5 is a int.*timedelta"):
        InitProcessGroupKwargs(timeout=5)
