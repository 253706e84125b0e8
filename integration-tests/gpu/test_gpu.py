"""What only a device can show: one script, under five minutes. Its logic runs on the CPU in the core tier.

`tools/dev test integration-tests --gpu -- -k gpu` runs it on a CUDA device; without one it is skipped, and says so.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel import Accelerator, GradScalerKwargs
from accel.utils import AORecipeKwargs, has_ao_layers
from accel_state import AcceleratorState
from accel_state.errors import PrecisionError

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.fixture
def _fresh_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])])
def device(request, _fresh_state):
    """Where to run: the CPU in the core tier, a GPU in its own."""
    return request.param


def accelerator_on(device: str, precision: str, *handlers: object) -> Accelerator:
    made = Accelerator(cpu=device == "cpu", mixed_precision=precision, kwargs_handlers=list(handlers))
    assert made.device.type == device
    return made


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))


def losses(accelerator: Accelerator, model: nn.Module, updates: int = 20) -> list[float]:
    """Of a regression that every precision can learn."""
    torch.manual_seed(1)
    x, y = (torch.randn(256, size).to(accelerator.device) for size in (64, 16))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    seen = []
    for _ in range(updates):
        loss = (model(x) - y).pow(2).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-2), ("fp16", 5e-3), ("fp8", 5e-2)])
def test_training_in_each_precision_follows_fp32(device, precision, tolerance):
    full = losses(accelerator_on(device, "no"), net())
    model = net()
    try:
        accelerator = accelerator_on(device, precision, *([AORecipeKwargs()] if precision == "fp8" else []))
    except PrecisionError as error:
        pytest.skip(str(error))  # a GPU before 8-bit floats
    seen = losses(accelerator, model)
    assert has_ao_layers(model) == (precision == "fp8")
    assert seen != full
    assert seen[-1] < 0.9 * seen[0]
    assert all(abs(a - b) < tolerance for a, b in zip(full, seen, strict=True))


def test_an_overflow_skips_the_update_and_lowers_the_scale(device):
    handler = GradScalerKwargs(init_scale=1024.0, growth_interval=1)
    accelerator = accelerator_on(device, "fp16", handler)
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    seen = []
    for value in (float("inf"), 0.5):
        accelerator.backward(model(torch.full((2, 4), value, device=accelerator.device)).sum())
        optimizer.step()
        optimizer.zero_grad()
        unchanged = torch.equal(model.weight, before)
        seen.append((accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale(), unchanged))
    assert seen == [(True, 512.0, True), (False, 1024.0, False)]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.usefixtures("_fresh_state")
def test_a_step_inside_a_window_does_not_wait_for_the_device():
    accelerator = accelerator_on("cuda", "fp16", GradScalerKwargs(init_scale=1024.0))
    accelerator.gradient_accumulation_steps = 2
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(2, 4, device=accelerator.device)
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())  # makes the scale on the device
        torch.cuda.set_sync_debug_mode("error")
        try:
            accelerator.backward(model(x).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_generators_and_a_background_save_from_the_devices_memory(device, tmp_path):
    accelerator = accelerator_on(device, "no")
    model = accelerator.prepare(net())
    at_save = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    handle = accelerator.save_state(str(tmp_path / "state"), blocking=False)
    drawn = torch.rand(4, device=accelerator.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    handle.wait()
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(torch.rand(4, device=accelerator.device), drawn)
    assert all(torch.equal(tensor, at_save[name]) for name, tensor in model.state_dict().items())
    assert next(model.parameters()).device.type == device
