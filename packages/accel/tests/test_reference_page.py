"""The calls that the peer's reference page shows for each member of the Accelerator, in the same forms."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import ProfileKwargs

COVERED_BY = {
    "accumulate": "loops_on_one_process",
    "autocast": "a_block_in_half_precision",
    "backward": "loops_on_one_process",
    "check_trigger": "a_breakpoint",
    "clear": "letting_go",
    "clip_grad_norm_": "loops_on_one_process",
    "clip_grad_value_": "loops_on_one_process",
    "end_training": "trackers",
    "free_memory": "letting_go",
    "gather": "four_processes",
    "gather_for_metrics": "two_processes",
    "get_state_dict": "the_state_of_a_model",
    "get_tracker": "trackers",
    "join_uneven_inputs": "two_processes",
    "load_state": "saving_and_loading",
    "local_main_process_first": "two_processes",
    "main_process_first": "two_processes",
    "maybe_context_parallel": "context_parallel",
    "no_sync": "two_processes",
    "on_last_process": "four_processes",
    "on_local_main_process": "four_processes",
    "on_local_process": "four_processes",
    "on_main_process": "four_processes",
    "on_process": "four_processes",
    "pad_across_processes": "two_processes",
    "prepare": "preparing",
    "prepare_data_loader": "preparing",
    "prepare_model": "preparing",
    "prepare_optimizer": "preparing",
    "prepare_scheduler": "preparing",
    "print": "four_processes",
    "profile": "profiling",
    "reduce": "two_processes",
    "register_for_checkpointing": "saving_and_loading",
    "register_load_state_pre_hook": "saving_and_loading",
    "register_save_state_pre_hook": "saving_and_loading",
    "save": "saving_single_things",
    "save_model": "saving_single_things",
    "save_state": "saving_and_loading",
    "set_trigger": "a_breakpoint",
    "skip_first_batches": "skipping",
    "split_between_processes": "two_processes",
    "trigger_sync_in_backward": "two_processes",
    "unscale_gradients": "loops_on_one_process",
    "unwrap_model": "two_processes",
    "wait_for_everyone": "two_processes",
}
"""Member to the end of the name of the test that calls it as the page does."""


def parts():
    """A model, an optimizer, a loader and a scheduler, as the page assumes them to be defined."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
    return model, optimizer, DataLoader(data, batch_size=2), torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)


def test_the_table_names_tests_that_call_the_member():
    source = Path(__file__).read_text()
    for member, name in COVERED_BY.items():
        body = "".join(re.findall(rf"^def (?:test|on)_{name}\(.*?(?=^def |\Z)", source, re.MULTILINE | re.DOTALL))
        assert f".{member}(" in body or f".{member}\n" in body, (member, name)


# ------------------------------------------------------------------ one process


@pytest.mark.parametrize("steps", [1, 2])
def test_loops_on_one_process(steps):
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model, optimizer, dataloader, scheduler = parts()
    dataloader, model, optimizer, scheduler = accelerator.prepare(dataloader, model, optimizer, scheduler)
    before = model.weight.detach().clone()

    for inputs, target in dataloader:  # accumulate: with `loss.backward()`, as the page has it
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert not torch.equal(model.weight, before)

    for clip in ("norm", "value", "unscale"):
        for inputs, target in dataloader:
            optimizer.zero_grad()
            output = model(inputs)
            loss = F.cross_entropy(output, target)
            accelerator.backward(loss)
            if clip == "norm" and accelerator.sync_gradients:
                assert accelerator.clip_grad_norm_(model.parameters(), 1e-3) > 1e-3
                assert model.weight.grad.norm() <= 1e-3
            if clip == "value" and accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 1e-3)
                assert model.weight.grad.abs().max() <= 1e-3
            if clip == "unscale":
                gradient = model.weight.grad.clone()
                accelerator.unscale_gradients(optimizer=optimizer)
                assert torch.equal(model.weight.grad, gradient)  # there is nothing to unscale in float32
            optimizer.step()


def test_a_block_in_half_precision():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with accelerator.autocast():
        assert nn.Linear(2, 2)(torch.randn(1, 2)).dtype is torch.bfloat16
    with Accelerator(cpu=True, mixed_precision="fp16").autocast():
        assert nn.Linear(2, 2)(torch.randn(1, 2)).dtype is torch.float16


def test_a_breakpoint():
    accelerator = Accelerator()
    for loss in (1.0, float("nan"), 1.0):
        if loss != loss:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    assert loss != loss
    assert accelerator.check_trigger() is False


def test_letting_go():
    for release in ("free_memory", "clear"):
        accelerator = Accelerator()
        model, optimizer, _, scheduler = parts()
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        accelerator.step = 3
        if release == "clear":
            model, optimizer, scheduler = accelerator.clear(model, optimizer, scheduler)
        else:
            model, optimizer, scheduler = accelerator.free_memory(model, optimizer, scheduler)
        assert (model, optimizer, scheduler, accelerator.step) == (None, None, None, 0)
        assert accelerator._models == []


def test_the_state_of_a_model():
    accelerator = Accelerator()
    net = torch.nn.Linear(2, 2)
    net = accelerator.prepare(net)
    assert sorted(accelerator.get_state_dict(net)) == ["bias", "weight"]


def test_trackers(tmp_path):
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)  # the page has tensorboard, which is an extra
    accelerator.init_trackers("my_project")
    assert accelerator.get_tracker("jsonl").name == "jsonl"
    accelerator.end_training()
    assert (tmp_path / "my_project" / "metrics.jsonl").exists()


def test_context_parallel():
    accelerator = Accelerator()
    batch = {"input_ids": torch.arange(6).view(1, 6), "attention_mask": torch.ones(1, 6)}
    with accelerator.maybe_context_parallel(
        buffers=[batch["input_ids"], batch["attention_mask"]],
        buffer_seq_dims=[1, 1],
        no_restore_buffers={batch["input_ids"]},
    ):
        assert batch["input_ids"].shape == (1, 6)  # harmless without cp


def test_preparing():
    accelerator = Accelerator()
    model, optimizer, data_loader, scheduler = parts()
    model, optimizer, data_loader, scheduler = accelerator.prepare(model, optimizer, data_loader, scheduler)
    assert isinstance(model, nn.Linear)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(data_loader, DataLoader)
    assert scheduler.get_last_lr() == [0.1]

    device_placement = [True, True, False, False]
    model, optimizer, data_loader, scheduler = parts()
    model, optimizer, data_loader, scheduler = accelerator.prepare(
        model, optimizer, data_loader, scheduler, device_placement=device_placement
    )
    assert next(iter(data_loader))[0].device == torch.device("cpu")

    model, optimizer, data_loader, scheduler = parts()
    data_loader = accelerator.prepare_data_loader(data_loader, device_placement=True)
    model = accelerator.prepare_model(model)
    optimizer = accelerator.prepare_optimizer(optimizer, device_placement=True)
    scheduler = accelerator.prepare_scheduler(scheduler)
    assert len(data_loader) == 4
    assert scheduler.get_last_lr() == [0.1]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch would crash where it is an error
def test_profiling(tmp_path, capsys):
    def train():
        torch.rand(8, 8) @ torch.rand(8, 8)

    accelerator = Accelerator()
    with accelerator.profile() as prof:
        train()
    accelerator.print(prof.key_averages().table())
    assert "aten::mm" in capsys.readouterr().out

    def custom_handler(prof):
        print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=10))

    kwargs = ProfileKwargs(schedule_option={"wait": 1, "warmup": 1, "active": 1}, on_trace_ready=custom_handler)
    accelerator = Accelerator(kwargs_handlers=[kwargs])  # the page says kwarg_handler
    with accelerator.profile() as prof:
        for _ in range(10):
            train()
            prof.step()
    assert "aten::mm" in capsys.readouterr().out

    kwargs = ProfileKwargs(output_trace_dir=str(tmp_path / "output_trace"))
    accelerator = Accelerator(kwargs_handlers=[kwargs])
    with accelerator.profile():
        train()
    assert json.loads((tmp_path / "output_trace" / "profile_0.json").read_text())["traceEvents"]


class CustomObject:
    """Has a `state_dict` and `load_state_dict` function."""

    value = 3

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_saving_and_loading(tmp_path):
    accelerator = Accelerator()
    model, optimizer, _, lr_scheduler = parts()
    model, optimizer, lr_scheduler = accelerator.prepare(model, optimizer, lr_scheduler)
    obj = CustomObject()
    accelerator.register_for_checkpointing(obj)
    called = []
    accelerator.register_save_state_pre_hook(lambda models, weights, output_dir: called.append((models, weights)))
    handle = accelerator.register_load_state_pre_hook(lambda models, input_dir: called.append(input_dir))
    accelerator.save_state(output_dir=tmp_path / "my_checkpoint")
    assert called[0][0] == [model]
    assert sorted(called[0][1][0]) == ["bias", "weight"]

    saved, obj.value = model.weight.detach().clone(), 4
    nn.init.zeros_(model.weight)
    accelerator.load_state(tmp_path / "my_checkpoint")
    assert torch.equal(model.weight, saved)
    assert obj.value == 3
    handle.remove()
    accelerator.load_state(tmp_path / "my_checkpoint")
    assert len(called) == 2


def test_saving_single_things(tmp_path):
    accelerator = Accelerator()
    arr = [0, 1, 2, 3]
    accelerator.save(arr, tmp_path / "array.pkl")
    assert torch.load(tmp_path / "array.pkl", weights_only=True) == arr
    model = nn.Linear(2, 2)
    accelerator.save_model(model, tmp_path / "save_directory")
    assert (tmp_path / "save_directory" / "model.safetensors").exists()


def test_skipping():
    accelerator = Accelerator()
    model, optimizer, dataloader, scheduler = parts()
    dataloader, model, optimizer, scheduler = accelerator.prepare(dataloader, model, optimizer, scheduler)
    skipped_dataloader = accelerator.skip_first_batches(dataloader, num_batches=2)
    assert [len(list(skipped_dataloader)), len(list(dataloader))] == [2, 4]


# ------------------------------------------------------------------ several processes


def on_two_processes(folder):
    """What the page shows with two processes; returns what each of them saw."""
    import contextlib
    import io

    accelerator = Accelerator(cpu=True)
    rank, seen = accelerator.process_index, {}

    dataloader = torch.utils.data.DataLoader(range(9), batch_size=5)
    dataloader = accelerator.prepare(dataloader)
    batch = next(iter(dataloader))
    seen["gather_for_metrics"] = len(accelerator.gather_for_metrics(batch))

    process_tensor = torch.arange(accelerator.num_processes) + 1 + (2 * accelerator.process_index)
    process_tensor = process_tensor.to(accelerator.device)
    seen["reduce"] = accelerator.reduce(process_tensor, reduction="sum").tolist()

    process_tensor = torch.arange(accelerator.process_index + 1).to(accelerator.device)
    seen["pad"] = accelerator.pad_across_processes(process_tensor).shape

    with accelerator.split_between_processes(["A", "B", "C"]) as inputs:
        seen["split"] = list(inputs)
    with accelerator.split_between_processes(["A", "B", "C"], apply_padding=True) as inputs:
        seen["padded"] = list(inputs)

    model = accelerator.prepare(nn.Linear(4, 2))
    seen["wrapped"] = model.__class__.__name__
    seen["unwrapped"] = accelerator.unwrap_model(model).__class__.__name__

    with accelerator.main_process_first():
        (Path(folder) / f"first-{rank}").touch()
        seen["main first"] = (Path(folder) / "first-0").exists()
    with accelerator.local_main_process_first():
        print(f"This will be printed by process {accelerator.local_process_index}")
    accelerator.wait_for_everyone()
    seen["everyone"] = (Path(folder) / "first-1").exists()

    model, optimizer, dataloader, _ = parts()
    dataloader, model, optimizer = accelerator.prepare(dataloader, model, optimizer)

    def alike():
        gradients = accelerator.gather(model.module.weight.grad[None])
        return torch.equal(gradients[0], gradients[1])

    (input_a, target_a), (input_b, target_b) = dataloader
    with accelerator.no_sync():  # the page leaves the model out here
        accelerator.backward(F.cross_entropy(model(input_a), target_a))
        seen["no_sync"] = alike()
    accelerator.backward(F.cross_entropy(model(input_b), target_b))
    seen["synced"] = alike()
    optimizer.step()
    optimizer.zero_grad()

    with accelerator.no_sync():
        loss_a = F.cross_entropy(model(input_a), target_a)
        loss_b = F.cross_entropy(model(input_b), target_b)
    accelerator.backward(loss_a)
    seen["before the trigger"] = alike()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss_b)
    seen["triggered"] = alike()
    optimizer.step()
    optimizer.zero_grad()

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=True))
    model, optimizer, _, _ = parts()
    dataloader = DataLoader(TensorDataset(torch.randn(3, 4)), batch_size=1)
    ddp_model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    with accelerator.join_uneven_inputs([ddp_model], even_batches=False), contextlib.redirect_stdout(io.StringIO()):
        seen["batches"] = 0
        for (inputs,) in dataloader:
            ddp_model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen["batches"] += 1
    return seen


def test_two_processes(ranks, tmp_path):
    """Calls gather_for_metrics and the others of `on_two_processes`, of which COVERED_BY speaks."""
    first, second = ranks(on_two_processes, 2, str(tmp_path))
    assert (first.pop("split"), second.pop("split")) == (["A", "B"], ["C"])
    assert (first.pop("padded"), second.pop("padded")) == (["A", "B"], ["C", "C"])
    assert (first.pop("batches"), second.pop("batches")) == (2, 1)
    assert first == second
    assert first == {
        "gather_for_metrics": 9,
        "reduce": [4, 6],
        "pad": torch.Size([2]),
        "wrapped": "DistributedDataParallel",
        "unwrapped": "Linear",
        "main first": True,
        "everyone": True,
        "no_sync": False,
        "synced": True,
        "before the trigger": False,
        "triggered": True,
    }


def on_four_processes():
    """What the page shows with four processes; returns what each of them printed and gathered."""
    import contextlib
    import io

    accelerator = Accelerator(cpu=True)
    process_tensor = torch.tensor([accelerator.process_index], device=accelerator.device)
    gathered_tensor = accelerator.gather(process_tensor)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):

        @accelerator.on_last_process
        def print_on_last():
            print(f"Printed on process {accelerator.process_index}")

        @accelerator.on_local_main_process
        def print_on_local_main():
            print("This will be printed by process 0 only on each server.")

        @accelerator.on_local_process(local_process_index=2)
        def print_on_local_two():
            print(f"Printed on process {accelerator.local_process_index}")

        @accelerator.on_main_process
        def print_on_main():
            print("This will be printed by process 0 only.")

        @accelerator.on_process(process_index=2)
        def print_on_two():
            print(f"Printed on process {accelerator.process_index}")

        for function in (print_on_last, print_on_local_main, print_on_local_two, print_on_main, print_on_two):
            function()
        accelerator.print("Hello world!")
    return gathered_tensor.tolist(), text.getvalue().splitlines()


def test_four_processes(ranks):
    (gathered, first), (_, second), (_, third), (_, fourth) = ranks(on_four_processes, 4)
    assert gathered == [0, 1, 2, 3]
    assert first == [
        "This will be printed by process 0 only on each server.",
        "This will be printed by process 0 only.",
        "Hello world!",
    ]
    assert second == []
    assert third == ["Printed on process 2"] * 2
    assert fourth == ["Printed on process 3"]


# ------------------------------------------------------------------ where the page is off


def test_the_right_word_is_named_where_the_page_has_a_wrong_one():
    with pytest.raises(AttributeError, match="'check_breakpoint': it is check_trigger that is meant"):
        Accelerator().check_breakpoint()
    with pytest.raises(TypeError, match="no argument 'kwarg_handler': did you mean 'kwargs_handlers'"):
        Accelerator(kwarg_handler=[ProfileKwargs()])
    with pytest.raises(TypeError, match=r"give dataloader_config=DataLoaderConfiguration\(even_batches=\.\.\.\)"):
        Accelerator(even_batches=True)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("total_limit", r"give project_config=ProjectConfiguration\(total_limit=\.\.\.\)"),
        ("mixed_precison", "did you mean 'mixed_precision'"),
        ("zzz", "there are device_placement, split_batches"),
    ],
)
def test_other_unknown_words_get_a_hint_too(word, hint):
    with pytest.raises(TypeError, match=hint):
        Accelerator(**{word: 1})
