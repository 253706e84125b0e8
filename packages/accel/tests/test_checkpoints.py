"""Saving and loading through the Accelerator."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accel_ckpt
from accel import Accelerator, ProjectConfiguration, set_seed
from accel_state import AcceleratorState
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, SettingError


class Run:
    """A model with dropout, an optimizer with state, a schedule and a shuffled loader, ready to train."""

    def __init__(self, tmp_path, seed: int = 0, **project) -> None:
        config = ProjectConfiguration(project_dir=str(tmp_path), **project)
        self.accelerator = Accelerator(cpu=True, project_config=config, step_scheduler_with_optimizer=False)
        set_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
        loader = DataLoader(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), batch_size=2, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )

        self.batches = self.stream()

    def stream(self):
        """Epoch after epoch, as a loop that is never left: leaving one would begin a new epoch at the next."""
        while True:
            yield from self.loader

    def train(self, updates: int) -> list[float]:
        """Losses of so many further updates."""
        losses = []
        for _ in range(updates):
            loss = self.model(next(self.batches)).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("before", [0, 5, 12, 17])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, before):
    run = Run(tmp_path)
    run.train(before)
    run.accelerator.save_state(tmp_path / "state")
    expected = run.train(20)
    again = Run(tmp_path, seed=99)
    again.accelerator.load_state(tmp_path / "state")
    assert again.train(20) == expected


def test_automatic_naming_counts_and_keeps_the_newest(tmp_path):
    run = Run(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    for _ in range(3):
        run.train(1)
        run.accelerator.save_state()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_1", "checkpoint_2"]
    again = Run(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    with pytest.raises(CheckpointError, match="of an earlier run"):
        again.accelerator.project_configuration.iteration = 2
        again.accelerator.save_state()
    again.accelerator.load_state()
    assert again.accelerator.save_iteration == 3
    again.accelerator.save_state()
    assert (tmp_path / "checkpoints" / "checkpoint_3").is_dir()


@pytest.mark.parametrize("automatic", [False, True])
def test_a_save_in_the_background_holds_the_state_of_the_call(tmp_path, automatic):
    run = Run(tmp_path, automatic_checkpoint_naming=automatic)
    run.train(3)
    handle = run.accelerator.save_state(None if automatic else tmp_path / "state", blocking=False)
    expected = run.train(4)
    directory = handle.wait()
    run.accelerator.end_training()
    again = Run(tmp_path, seed=99)
    again.accelerator.load_state(directory)
    assert again.train(4) == expected


def test_loading_without_a_directory_needs_automatic_naming_and_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="automatic_checkpoint_naming"):
        Run(tmp_path).accelerator.load_state()
    with pytest.raises(FileNotFoundError):
        Run(tmp_path, automatic_checkpoint_naming=True).accelerator.load_state()
    with pytest.raises(CheckpointError, match="needs output_dir"):
        Run(tmp_path).accelerator.save_state()


def test_a_damaged_newest_checkpoint_is_passed_over_and_its_number_left_alone(tmp_path):
    run = Run(tmp_path, automatic_checkpoint_naming=True)
    for _ in range(2):
        run.train(1)
        run.accelerator.save_state()
    (tmp_path / "checkpoints" / "checkpoint_1" / "manifest.json").write_text("{}")
    again = Run(tmp_path, seed=99, automatic_checkpoint_naming=True)
    with pytest.warns(RuntimeWarning, match="falling back"):
        again.accelerator.load_state()
    assert again.accelerator.save_iteration == 2
    assert again.accelerator.save_state() == str(tmp_path / "checkpoints" / "checkpoint_2")


def test_a_fresh_run_does_not_save_below_an_earlier_ones_checkpoints(tmp_path):
    first = Run(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    for _ in range(4):
        first.accelerator.save_state()
    fresh = Run(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    with pytest.raises(CheckpointError, match=r"up to checkpoint_3 of an earlier run.*4 or more"):
        fresh.accelerator.save_state()
    fresh.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_2")  # back to an older one, and on from there
    assert fresh.accelerator.save_state() == str(tmp_path / "checkpoints" / "checkpoint_4")


def test_loading_begins_accumulation_anew_as_a_fresh_process_would(tmp_path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.save_state(tmp_path / "state")

    def micro_step() -> bool:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
        return accelerator.sync_gradients

    assert not micro_step()
    accelerator.load_state(tmp_path / "state")
    assert model.weight.grad is None
    assert [micro_step(), micro_step()] == [False, True]


@pytest.mark.parametrize("path", ["", 3])
def test_a_path_that_is_none_is_refused(path):
    with pytest.raises(CheckpointError, match="is not a directory's path"):
        Accelerator(cpu=True).save_state(path)


def test_naming_without_a_project_directory_is_an_error():
    config = ProjectConfiguration(automatic_checkpoint_naming=True)
    with pytest.raises(SettingError, match="project_dir"):
        Accelerator(cpu=True, project_config=config).save_state()


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_registered_objects_travel_and_wrong_ones_are_all_named(tmp_path):
    run, first, second = Run(tmp_path), Counter(), Counter()
    run.accelerator.register_for_checkpointing(first, second)
    first.value, second.value = 3, 4
    run.accelerator.save_state(tmp_path / "state")
    first.value = second.value = 0
    run.accelerator.load_state(tmp_path / "state")
    assert (first.value, second.value) == (3, 4)
    with pytest.raises(ValueError, match=r"3 \(int\).*'x' \(str\)"):
        run.accelerator.register_for_checkpointing(Counter(), 3, "x")
    assert len(run.accelerator._custom_objects) == 2


def _weights(tmp_path, action: str):
    run = Run(tmp_path, seed=1 if action == "save" else 2)
    if action == "save":
        run.train(3)
        run.accelerator.save_state(tmp_path / "state")
    else:
        run.accelerator.load_state(tmp_path / "state")
    state = {name: value.clone() for name, value in run.accelerator.get_state_dict(run.model).items()}
    AcceleratorState._reset_state()
    return state, torch.rand(1).item()


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 2), (2, 1), (2, 2)])
def test_replicated_state_loads_on_any_world_size(tmp_path, ranks, saved_on, loaded_on):
    saved = ranks(_weights, saved_on, tmp_path, "save")
    loaded = ranks(_weights, loaded_on, tmp_path, "load")
    for state, _ in loaded:
        for name, value in saved[0][0].items():
            assert torch.equal(state[name], value)
    if saved_on == loaded_on:
        assert [draw for _, draw in saved] == [draw for _, draw in loaded]
    elif loaded_on == 2:
        assert loaded[0][1] != loaded[1][1], "a rank without saved generators gets a seed of its own"


def test_weights_and_objects_are_written_for_other_readers(tmp_path):
    run = Run(tmp_path)
    run.accelerator.save_model(run.model, tmp_path / "m", max_shard_size=100)
    assert (tmp_path / "m" / "model.safetensors.index.json").is_file()
    got: dict[str, torch.Tensor] = {}
    accel_ckpt.read_weights(tmp_path / "m", got.__setitem__)
    assert got.keys() == run.accelerator.unwrap_model(run.model).state_dict().keys()
    run.accelerator.save([1, 2], tmp_path / "list.pt")
    assert accel_ckpt.load(tmp_path / "list.pt") == [1, 2]
    run.accelerator.save(got, tmp_path / "dict.safetensors", safe_serialization=True)
    assert accel_ckpt.load_state_dict(tmp_path / "dict.safetensors").keys() == got.keys()


def test_saves_in_the_background_reuse_their_memory(tmp_path):
    run = Run(tmp_path)
    run.train(1)
    addresses = []
    for name in ("a", "b"):
        run.accelerator.save_state(tmp_path / name, blocking=False).wait()
        copies = run.accelerator.copy_buffers._copies
        addresses.append({(file, key): t.data_ptr() for file, parts in copies.items() for key, t in parts.items()})
    assert addresses[0] == addresses[1]
    assert len(addresses[0]) > 5


# ---------------------------------------------------------------- torch's files


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_run_goes_on_from_torch_files_bit_for_bit(tmp_path, automatic, blocking):
    run = Run(tmp_path, automatic_checkpoint_naming=automatic)
    run.train(5)
    directory = tmp_path / "checkpoints" / "checkpoint_0" if automatic else tmp_path / "state"
    saved = run.accelerator.save_state(None if automatic else directory, safe_serialization=False, blocking=blocking)
    expected = run.train(20)
    assert saved == str(directory) if blocking else saved.wait() == directory
    again = Run(tmp_path, seed=99, automatic_checkpoint_naming=automatic)
    again.accelerator.load_state(None if automatic else directory)
    assert again.train(20) == expected
    run.accelerator.end_training()


def test_torch_files_have_the_peers_names_and_are_read_weights_only(tmp_path):
    run = Run(tmp_path)
    run.accelerator.register_for_checkpointing(run.accelerator.tracker_set)
    run.train(2)
    run.accelerator.save_state(tmp_path / "state", safe_serialization=False)
    names = {path.name for path in (tmp_path / "state").iterdir()}
    torch_files = {"pytorch_model.bin", "optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl"}
    assert names >= torch_files | {"random_states_0.pkl"}
    assert not any(name.startswith(("model", "optimizer.safetensors")) for name in names)
    assert torch_files <= accel_ckpt.verify_checkpoint(tmp_path / "state").files.keys(), "in the transaction"
    found = {name: torch.load(tmp_path / "state" / name, weights_only=True) for name in torch_files}
    live = run.accelerator.unwrap_model(run.model).state_dict()
    assert found["pytorch_model.bin"].keys() == live.keys()
    assert all(torch.equal(found["pytorch_model.bin"][name], live[name]) for name in live)
    assert found["optimizer.bin"]["state"][0]["step"] == 2
    assert found["scheduler.bin"]["last_epoch"] == 2


def test_torch_files_that_were_altered_are_refused(tmp_path):
    run = Run(tmp_path)
    run.accelerator.save_state(tmp_path / "state", safe_serialization=False)
    (tmp_path / "state" / "optimizer.bin").write_bytes(b"")
    with pytest.raises(CheckpointCorruptError, match=r"optimizer\.bin has 0 bytes"):
        run.accelerator.load_state(tmp_path / "state")


class Odd:
    """A state that only running code could bring back."""

    def state_dict(self):
        return {"value": Odd()}

    def load_state_dict(self, state):
        raise AssertionError(state)


def test_what_could_not_be_read_weights_only_is_not_written(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(Odd())
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl would hold .*Odd.*weights-only"):
        accelerator.save_state(tmp_path / "state", safe_serialization=False)
    assert list(tmp_path.iterdir()) == []


def test_hooks_see_torch_files_too(tmp_path):
    accelerator = Accelerator(cpu=True)
    models = accelerator.prepare(nn.Linear(1, 1), nn.Linear(2, 2))

    def keep_second(models, weights, output_dir):
        weights.pop(0)

    accelerator.register_save_state_pre_hook(keep_second)
    accelerator.save_state(tmp_path / "state", safe_serialization=False)
    state = torch.load(tmp_path / "state" / "pytorch_model.bin", weights_only=True)
    assert state["weight"].shape == (2, 2)
    assert not (tmp_path / "state" / "pytorch_model_1.bin").exists()
    accelerator.register_load_state_pre_hook(lambda models, input_dir: models.pop(0))
    expected = models[1].weight.detach().clone()
    with torch.no_grad():
        models[1].weight.zero_()
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(models[1].weight, expected)


def test_a_checkpoint_of_torch_files_is_not_converted(tmp_path):
    Run(tmp_path).accelerator.save_state(tmp_path / "state", safe_serialization=False)
    for convert in (accel_ckpt.convert_to_accelerate, accel_ckpt.convert_to_dcp):
        with pytest.raises(CheckpointError, match="in accelerate's layout already"):
            convert(tmp_path / "state", tmp_path / "new")
