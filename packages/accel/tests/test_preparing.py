"""Preparing objects and training with them in one process."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator, GradScalerKwargs
from accel_parallel import AcceleratedOptimizer, AcceleratedScheduler
from accel_state.errors import SettingError


def objects():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = DataLoader(torch.arange(16.0).view(8, 2), batch_size=2)
    return model, optimizer, scheduler, loader


def test_objects_come_back_in_the_order_given():
    model, optimizer, scheduler, loader = objects()
    accelerator = Accelerator(cpu=True)
    other = object()
    results = accelerator.prepare(loader, scheduler, other, optimizer, model)
    kinds = [type(result) for result in results]
    assert kinds[1] is AcceleratedScheduler
    assert kinds[3] is AcceleratedOptimizer
    assert isinstance(results[0], DataLoader)
    assert results[2] is other
    assert results[4] is model
    assert results[1].optimizers == [results[3]]


def test_a_single_object_comes_back_bare_and_preparing_is_idempotent():
    model, optimizer, _, loader = objects()
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    assert prepared is model
    wrapped, sharded = accelerator.prepare(optimizer, loader)
    assert accelerator.prepare(model, wrapped, sharded) == (model, wrapped, sharded)
    assert [len(held) for held in (accelerator._models, accelerator._optimizers, accelerator._dataloaders)] == [1, 1, 1]


def test_device_placement_needs_one_entry_per_object():
    model, optimizer, *_ = objects()
    with pytest.raises(SettingError, match="1 entries for 2 objects"):
        Accelerator(cpu=True).prepare(model, optimizer, device_placement=[True])


def test_a_model_that_is_not_to_be_moved_stays_where_it_is():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1), device_placement=[False])
    assert model.weight.device == torch.device("cpu")
    assert "stay where they are" in Accelerator(cpu=True, device_placement=False).explain()


def test_accumulation_updates_at_the_end_of_each_window_and_of_the_epoch():
    model, optimizer, scheduler, loader = objects()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    flags, rates = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        flags.append(accelerator.sync_gradients)
        rates.append(optimizer.param_groups[0]["lr"])
    assert flags == [False, False, True, True]  # the last batch ends its window early
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.025])
    assert accelerator.step == 4


def test_two_models_keep_windows_of_their_own():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    one, other = accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1))
    flags = []
    for _ in range(4):
        for model in (one, other):
            with accelerator.accumulate(model):
                flags.append(accelerator.sync_gradients)
    assert flags == [False, False, True, True] * 2


def test_bf16_computes_in_bf16_and_returns_fp32():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    seen = []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    model = accelerator.prepare(model)
    out = model(torch.ones(2, 4))
    assert (seen, out.dtype, model[0].weight.dtype) == ([torch.bfloat16], torch.float32, torch.float32)
    with accelerator.autocast():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16


def test_fp16_on_cpu_scales_the_loss_and_clips_the_true_gradient():
    handler = GradScalerKwargs(init_scale=1024.0)  # times a gradient of 1 it still fits into fp16
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler])
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.full((1, 1), 0.5)).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.25)
    assert norm.item() == pytest.approx(0.5, rel=1e-3)
    assert model.weight.grad.item() == pytest.approx(0.25, rel=1e-3)
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped


def test_clipping_inside_a_window_changes_nothing_and_returns_the_norm_so_far():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((1, 1), 8.0)).sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert (norm.item(), model.weight.grad.item()) == (4.0, 4.0)


def test_unwrapped_without_autocast_the_prepared_model_keeps_working():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(4, 4))
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    x = torch.randn(2, 4)
    assert torch.equal(bare(x), nn.functional.linear(x, model.weight, model.bias))
    assert not torch.equal(model(x), bare(x))
    assert accelerator.get_state_dict(model).keys() == {"weight", "bias"}


def test_prepared_objects_pickle():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer, scheduler, loader = accelerator.prepare(*objects())
    for item in (model, optimizer, scheduler, loader):
        copy = pickle.loads(pickle.dumps(item))
        assert type(copy) is type(item)
    copied = pickle.loads(pickle.dumps(model))
    x = torch.randn(2, 2)
    assert torch.equal(copied(x), model(x))


def test_nothing_outlives_free_memory_even_without_the_collector():
    gc.collect()
    gc.disable()
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model, optimizer, scheduler, loader = accelerator.prepare(*objects())
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        del batch
        alive = [weakref.ref(item) for item in (model, optimizer, scheduler, loader)]
        gc_was_off = not gc.isenabled()
        model, optimizer, scheduler, loader = accelerator.free_memory(model, optimizer, scheduler, loader)
        assert gc_was_off
        assert (model, optimizer, scheduler, loader) == (None, None, None, None)
        assert [ref() for ref in alive] == [None] * 4
        assert accelerator.step == 0
        reference = weakref.ref(accelerator)
        del accelerator
        assert reference() is None
    finally:
        gc.enable()


def test_harmless_calls_stay_harmless_on_one_process():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.no_sync(model), accelerator.autocast():
        accelerator.backward(model(torch.ones(1, 1)).sum())
    with accelerator.no_sync(), accelerator.trigger_sync_in_backward(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    accelerator.unscale_gradients()
    accelerator.wait_for_everyone()
    with pytest.warns(UserWarning, match="no effect") as warned, accelerator.join_uneven_inputs([model]):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    assert warned[0].filename == __file__
    loader = accelerator.prepare(DataLoader(torch.arange(4)))
    with pytest.warns(UserWarning, match="no effect"), accelerator.join_uneven_inputs([model], even_batches=False):
        assert not loader.batch_sampler.even_batches
    assert loader.batch_sampler.even_batches
    assert model.weight.grad.item() == 3.0


@pytest.mark.parametrize("method", ["prepare_model", "prepare_optimizer", "prepare_scheduler"])
def test_preparing_something_else_by_name_is_refused(method):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(SettingError, match=rf"{method} takes .*got 3 of type int"):
        getattr(accelerator, method)(3)
    assert not accelerator._schedulers


def test_another_accelerator_takes_prepared_objects_over():
    """As when a notebook's cell runs again: the new settings count, not those of the first preparation."""
    first = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = first.prepare(*objects())
    second = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, scheduler, loader = second.prepare(*prepared)
    assert model is prepared[0]
    assert {item.gradient_state for item in (optimizer, scheduler, loader)} == {second.gradient_state}
    assert scheduler.optimizers == [optimizer]
    assert not hasattr(model, "_original_forward")
    before = model.weight.detach().clone()
    changed = []
    for batch in loader:
        with second.accumulate(model):
            second.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
        changed.append(not torch.equal(model.weight, before))
    assert changed == [False, False, False, True]


def test_preparing_the_same_bare_objects_again_gives_what_was_prepared():
    model, optimizer, scheduler, _ = objects()
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model, optimizer, scheduler)
    again = accelerator.prepare(model, optimizer, scheduler)
    assert all(one is other for one, other in zip(prepared, again, strict=True))
    assert [len(held) for held in (accelerator._models, accelerator._optimizers, accelerator._schedulers)] == [1, 1, 1]


def test_a_model_with_a_device_map_of_one_place_is_like_any_other():
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(2, 2))
    model.hf_device_map = {"": 0}
    assert not accelerator.verify_device_map(model)
    model[0].hf_device_map = {"weight": 0, "bias": 0}
    assert accelerator.verify_device_map(model)


def test_a_model_with_offloaded_weights_is_saved_whole(tmp_path):
    from accel import disk_offload
    from accel_ckpt import read_weights

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    want = {name: value.clone() for name, value in model.state_dict().items()}
    disk_offload(model, tmp_path / "offloaded", execution_device="cpu", offload_buffers=True)
    accelerator = Accelerator(cpu=True)
    got = accelerator.get_state_dict(model)
    accelerator.save_model(model, tmp_path / "model")
    written = {}
    read_weights(tmp_path / "model", written.__setitem__)
    for state in (got, written):
        assert state.keys() == want.keys()
        assert all(torch.equal(state[name], value) for name, value in want.items())


def test_a_dispatched_model_runs_prepared_where_it_lies(tmp_path):
    from accel import dispatch_model

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    want = model(x)
    device_map = {"0": "cpu", "1": "cpu", "2": "disk"}
    model = dispatch_model(model, device_map, main_device="cpu", offload_dir=tmp_path)
    prepared = Accelerator(cpu=True).prepare(model)
    assert torch.equal(prepared(x), want)
    assert prepared[2].weight.is_meta
