"""Accelerate's layout, written by hand: what is missing, does not fit, or would run code.

Files that accelerate wrote are read in the integration tests.
"""

from __future__ import annotations

import random
import sys
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_ckpt import (
    convert_to_accelerate,
    is_accelerate_checkpoint,
    load_accelerate_checkpoint,
    load_accelerator_state,
    save_accelerator_state,
    save_checkpoint,
)
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError, CheckpointNotFoundError


def objects(value: float):
    net = nn.Linear(3, 2)
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(value)
    opt = torch.optim.SGD(net.parameters(), lr=value, momentum=0.9)
    opt.state[net.weight]["momentum_buffer"] = torch.full_like(net.weight, value)
    return net, opt


@pytest.fixture
def written(tmp_path):
    net, opt = objects(1)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    torch.save(opt.state_dict(), tmp_path / "optimizer.bin")
    random.seed(3)
    state = {
        "step": 12,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.RandomState(3).get_state(),
        "torch_manual_seed": torch.Generator().manual_seed(3).get_state(),
    }
    torch.save(state, tmp_path / "random_states_0.pkl")
    return tmp_path


def values(net, opt) -> set[float]:
    return {*net.weight.reshape(-1).tolist(), *opt.state[net.weight]["momentum_buffer"].reshape(-1).tolist()}


def test_everything_comes_back(written):
    assert is_accelerate_checkpoint(written)
    net, opt = objects(5)
    assert load_accelerate_checkpoint(written, models=[net], optimizers=[opt]) == 12
    assert values(net, opt) == {1.0}
    assert opt.param_groups[0]["lr"] == 1
    assert random.random() == random.Random(3).random()
    assert np.random.rand() == np.random.RandomState(3).rand()  # noqa: NPY002 - the global generator
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(3)))
    assert load_accelerator_state(written, [net], [opt], [], [], 0, map_location="cpu") == {"step": 12}


def test_names_of_data_parallel_wrappers_and_ties(written):
    net, opt = objects(5)
    state = torch.load(written / "optimizer.bin", weights_only=True)
    save_file({f"module.{k}": torch.ones_like(v) for k, v in net.state_dict().items()}, written / "model.safetensors")
    load_accelerate_checkpoint(written, models=[net], optimizers=[opt])
    assert values(net, opt) == {1.0}
    tied = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    tied[1].weight = tied[0].weight
    save_file({"1.weight": torch.full((2, 2), 7.0)}, written / "model.safetensors")
    load_accelerate_checkpoint(written, models=[tied])
    assert tied[0].weight.mean() == 7
    assert state["param_groups"][0]["lr"] == 1


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.bin"])
def test_a_missing_file_is_named_and_changes_nothing(written, file):
    (written / file).unlink()
    net, opt = objects(5)
    with pytest.raises(CheckpointNotFoundError, match=file.replace(".", r"\.")):
        load_accelerate_checkpoint(written, models=[net], optimizers=[opt])
    assert values(net, opt) == {5.0}


def test_weights_that_do_not_fit_are_listed_and_change_nothing(written):
    save_file({"weight": torch.ones(9, 9), "odd": torch.ones(1)}, written / "model.safetensors")
    net, opt = objects(5)
    with pytest.raises(
        CheckpointMismatchError, match=r"bias: missing.*odd: only in.*weight: shape \(9, 9\).*\(2, 3\) here"
    ):
        load_accelerate_checkpoint(written, models=[net], optimizers=[opt])
    assert values(net, opt) == {5.0}


def test_an_optimizer_that_does_not_fit_is_named(written):
    net, _ = objects(5)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1)) for _ in range(5)])
    with pytest.raises(CheckpointError, match=r"optimizer\.bin: groups of \[2\] parameters, SGD has groups of \[5\]"):
        load_accelerate_checkpoint(written, models=[net], optimizers=[other])


class Bomb:
    def __reduce__(self):
        return sys.exit, (66,)


@pytest.mark.parametrize("file", ["optimizer.bin", "scheduler.bin", "scaler.pt", "random_states_0.pkl", "model.bin"])
def test_a_pickle_that_would_run_code_is_refused(written, file):
    if file == "model.bin":
        (written / "model.safetensors").unlink()
        file = "pytorch_model.bin"
    torch.save({"state": Bomb()}, written / file)
    net, opt = objects(5)
    schedule, scaler = torch.optim.lr_scheduler.StepLR(opt, 1), torch.amp.GradScaler("cpu")
    if file == "scaler.pt":
        torch.save(schedule.state_dict(), written / "scheduler.bin")
    elif file != "scheduler.bin":
        torch.save(schedule.state_dict(), written / "scheduler.bin")
        torch.save(scaler.state_dict(), written / "scaler.pt")
    with pytest.raises(CheckpointCorruptError, match=file.replace(".", r"\.")):
        load_accelerate_checkpoint(written, models=[net], optimizers=[opt], schedulers=[schedule], scaler=scaler)
    assert values(net, opt) == {5.0}


def test_generators_that_are_not_there_or_unknown_are_told(written):
    with pytest.warns(RuntimeWarning, match="no random generators of process 1"):
        assert load_accelerate_checkpoint(written, process_index=1) is None
    torch.save({"step": 1, "torch_xpu_manual_seed": 3}, written / "random_states_0.pkl")
    with pytest.warns(RuntimeWarning, match="left unread: torch_xpu_manual_seed"):
        load_accelerate_checkpoint(written)
    torch.save([1], written / "random_states_0.pkl")
    with pytest.raises(CheckpointCorruptError, match="holds a list"):
        load_accelerate_checkpoint(written)


@pytest.mark.parametrize("options", [{"map_location": "cuda:3"}, {"weights_only": False}, {"odd": 1}])
def test_options_that_cannot_be_honoured_are_errors(written, options):
    with pytest.raises(CheckpointError, match=r"cannot honour|cannot be honoured"):
        load_accelerator_state(written, [], [], [], [], 0, **options)


def test_our_checkpoint_in_their_layout_and_back(tmp_path):
    net, opt = objects(1)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2)
    counter = nn.Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule.step()
    save_checkpoint(tmp_path / "c", {"net": net, "opt": opt, "schedule": schedule, "empty": counter}, step=4)
    assert not is_accelerate_checkpoint(tmp_path / "c")
    assert convert_to_accelerate(tmp_path / "c", tmp_path / "there") == []
    assert is_accelerate_checkpoint(tmp_path / "there")
    again, opt_again = objects(5)
    other = torch.optim.lr_scheduler.StepLR(opt_again, 7)
    models = [again, nn.Module()]
    assert (
        load_accelerate_checkpoint(tmp_path / "there", models=models, optimizers=[opt_again], schedulers=[other]) == 4
    )
    assert values(again, opt_again) == {1.0}
    assert other.state_dict() == schedule.state_dict()
    with pytest.raises(CheckpointError, match="exists already"):
        convert_to_accelerate(tmp_path / "c", tmp_path / "there")
    (tmp_path / "c" / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointCorruptError):
        convert_to_accelerate(tmp_path / "c", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("safe", [True, False])
def test_live_objects_in_their_layout_by_the_peers_signature(tmp_path, safe):
    net, opt = objects(1)
    schedule, scaler = torch.optim.lr_scheduler.StepLR(opt, 2), torch.amp.GradScaler("cpu", init_scale=8.0)
    found = save_accelerator_state(
        tmp_path / "c", [net.state_dict()], [opt], [schedule], [], 0, 7, scaler, safe_serialization=safe
    )
    assert found == tmp_path / "c"
    expected = random.random()
    weights = "model.safetensors" if safe else "pytorch_model.bin"
    assert {path.name for path in found.iterdir()} == {
        weights, "optimizer.bin", "scheduler.bin", "scaler.pt", "random_states_0.pkl"
    }  # fmt: skip
    again, opt_again = objects(5)
    others = torch.optim.lr_scheduler.StepLR(opt_again, 9), torch.amp.GradScaler("cpu")
    assert load_accelerator_state(found, [again], [opt_again], [others[0]], [], 0, others[1]) == {"step": 7}
    assert values(again, opt_again) == {1.0}
    assert others[0].step_size == 2
    assert others[1].get_scale() == 8
    assert random.random() == expected


def test_warnings_name_the_users_line(written):
    (written / "random_states_0.pkl").unlink()
    with pytest.warns(RuntimeWarning, match="no random generators") as caught:
        load_accelerate_checkpoint(written)
    assert caught[0].filename == __file__


def test_not_strict_loads_what_fits_and_lists_the_rest(written):
    net, _ = objects(5)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    schedule = torch.optim.lr_scheduler.StepLR(other, 3)
    models = [net, nn.Linear(1, 1)]
    save_file({"weight": torch.full((2, 3), 1.0), "bias": torch.zeros(9)}, written / "model.safetensors")
    with pytest.warns(RuntimeWarning, match="does not fit wholly") as caught:
        step = load_accelerate_checkpoint(
            written, models=models, optimizers=[other], schedulers=[schedule], strict=False
        )
    said = str(caught[0].message)
    for text in (
        r"model 0: bias: shape (9,) in the checkpoint, (2,) here",
        "no weights for model 1",
        "optimizer.bin: groups of [2] parameters, SGD has groups of [1]",
        "no scheduler.bin for StepLR",
    ):
        assert text in said
    assert step == 12
    assert net.weight.unique().tolist() == [1.0]
    assert net.bias.unique().tolist() == [5.0]


def test_a_callback_leaves_models_out_and_the_others_are_numbered_without_them(written):
    net, opt = objects(5)
    seen = []

    def leave_the_first(path):
        seen.append(path)
        return [0]

    extra = nn.Linear(9, 9)
    load_accelerate_checkpoint(written, models=[extra, net], optimizers=[opt], before_load=leave_the_first)
    assert values(net, opt) == {1.0}
    assert seen == [written]


def test_what_no_object_takes_is_named_in_one_line(written, caplog):
    (written / "sampler.bin").write_bytes(b"never read")
    (written / "notes.txt").write_text("mine")
    net, opt = objects(5)
    with caplog.at_level("INFO", "accel_ckpt"):
        load_accelerate_checkpoint(written, models=[net], optimizers=[opt])
        load_accelerate_checkpoint(written, models=[net])
    assert [record.getMessage().partition("also holds ")[2] for record in caplog.records] == [
        "sampler.bin, left unread",
        "optimizer.bin, sampler.bin, left unread",
    ]
