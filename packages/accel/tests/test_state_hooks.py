"""Hooks before saving and loading, as libraries use them to bring their own formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accel import Accelerator, ProjectConfiguration
from accel_state.errors import CheckpointError, CheckpointMismatchError, SettingError
from accel_testkit.nets import value_of


def accelerator_with(*values: float) -> tuple[Accelerator, list[nn.Module]]:
    accelerator = Accelerator(cpu=True)
    models = [nn.Linear(2, 2) for _ in values]
    with torch.no_grad():
        for model, value in zip(models, values, strict=True):
            for p in model.parameters():
                p.fill_(value)
    return accelerator, [accelerator.prepare(model) for model in models]


def test_a_library_saves_and_loads_its_model_in_its_own_way(tmp_path):
    accelerator, (unet, head) = accelerator_with(1, 2)
    seen = []

    def save_hook(models, weights, output_dir):
        seen.append((models is accelerator._models, len(models), [sorted(w) for w in weights]))
        torch.save(weights.pop(0), f"{output_dir}/unet.pt")

    accelerator.register_save_state_pre_hook(save_hook)
    accelerator.save_state(tmp_path / "c")
    assert seen == [(True, 2, [["bias", "weight"]] * 2)]
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert {"unet.pt", "model_1.safetensors"} <= names
    assert "model.safetensors" not in names

    again, (unet, head) = accelerator_with(8, 9)

    def load_hook(models, input_dir):
        models.pop(0).load_state_dict(torch.load(f"{input_dir}/unet.pt", weights_only=True))

    handle = again.register_load_state_pre_hook(load_hook)
    again.load_state(tmp_path / "c")
    assert (value_of(unet), value_of(head)) == (1, 2)
    assert again._models == [unet, head], "the models stay prepared"
    handle.remove()
    with pytest.raises(CheckpointMismatchError, match="Linear-0: not in the checkpoint"):
        again.load_state(tmp_path / "c")


def test_what_a_hook_makes_of_the_weights_is_written(tmp_path):
    accelerator, (model,) = accelerator_with(1)

    def double(models, weights, output_dir):
        weights[0] = {name: value * 2 for name, value in weights[0].items()}

    handle = accelerator.register_save_state_pre_hook(double)
    accelerator.register_save_state_pre_hook(double)
    accelerator.save_state(tmp_path / "c")
    assert value_of(model) == 1
    accelerator.load_state(tmp_path / "c")
    assert value_of(model) == 4
    handle.remove()
    accelerator.save_state(tmp_path / "c")
    accelerator.load_state(tmp_path / "c")
    assert value_of(model) == 8


def test_weights_of_no_model_are_refused(tmp_path):
    accelerator, _ = accelerator_with(1, 2)

    def mix_up(models, weights, output_dir):
        weights.pop()
        weights[0] = {}

    accelerator.register_save_state_pre_hook(mix_up)
    with pytest.raises(CheckpointError, match="left 1 weights for 2 models, some of them new"):
        accelerator.save_state(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_a_background_save_and_automatic_naming_call_hooks(tmp_path):
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=config)
    model = accelerator.prepare(nn.Linear(2, 2))
    loaded = []
    accelerator.register_save_state_pre_hook(lambda models, weights, path: Path(path, "note").touch())
    accelerator.register_load_state_pre_hook(lambda models, path: loaded.append((path, models.pop())))
    with pytest.warns(RuntimeWarning, match="elsewhere' is not used") as warned:
        directory = accelerator.save_state("elsewhere", blocking=False).wait()
    assert warned[0].filename == __file__
    assert (directory / "note").is_file()
    accelerator.load_state()
    assert loaded == [(str(tmp_path / "checkpoints" / "checkpoint_0"), model)]


def _popped_on_the_main_process_alone(tmp_path):
    accelerator, (model,) = accelerator_with(1)

    def save_hook(models, weights, output_dir):
        if accelerator.is_main_process:
            torch.save(weights.pop(), f"{output_dir}/own.pt")

    accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(lambda models, path: models.clear())
    accelerator.save_state(tmp_path / "c")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7)
    accelerator.load_state(tmp_path / "c")
    return value_of(model), torch.load(tmp_path / "c" / "own.pt", weights_only=True)["bias"].tolist()


def test_popping_on_the_main_process_is_enough(tmp_path, ranks):
    assert ranks(_popped_on_the_main_process_alone, 2, tmp_path) == [(7, [1, 1])] * 2


def test_options_that_nothing_takes_are_errors(tmp_path):
    accelerator, _ = accelerator_with(1)
    with pytest.raises(SettingError, match="exclude_frozen_parameters"):
        accelerator.save_state(tmp_path / "c", exclude_frozen_parameters=True)
    accelerator.save_state(tmp_path / "c")
    accelerator.load_state(tmp_path / "c", load_kwargs={"weights_only": True}, map_location="on_device")
    with pytest.raises(SettingError, match=r"weights_only=False \(allowed: True\), load_module_only=True \(unknown\)"):
        accelerator.load_state(tmp_path / "c", {"weights_only": False}, load_module_only=True)
    with pytest.raises(SettingError, match=r"map_location='cuda:7' \(allowed: None, 'cpu', 'on_device'\)"):
        accelerator.load_state(tmp_path / "c", map_location="cuda:7")


def test_saving_within_an_accumulation_window_warns(tmp_path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(2, 2))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    with pytest.warns(RuntimeWarning, match="not bit-exact") as warned:
        accelerator.save_state(tmp_path / "c")
    assert warned[0].filename == __file__
