"""Mixed precision through the Accelerator, in one process."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from accel import Accelerator, AutocastKwargs, GradScalerKwargs
from accel.utils import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    has_ao_layers,
    patch_environment,
)
from accel_state.errors import NotPreparedError, PlanError, PrecisionError, SettingError

BF16, FP32 = torch.bfloat16, torch.float32


def fp16(scale: float = 4.0, **options) -> Accelerator:
    handler = GradScalerKwargs(init_scale=scale, growth_interval=1000)
    return Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler], **options)


def line(value: float = 1.0) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def dtype_of_products() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


# ---------------------------------------------------------------- the scaler


def test_a_skipped_update_moves_neither_weights_nor_schedule():
    accelerator = fp16()
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    seen = []
    for value in (1.0, float("inf"), 1.0):
        accelerator.backward(model(torch.full((1, 1), value)).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped = accelerator.optimizer_step_was_skipped
        seen.append((skipped, model.weight.item(), scheduler.get_last_lr(), accelerator.scaler.get_scale()))
    assert seen == [(False, 0.0, [0.5], 4.0), (True, 0.0, [0.5], 2.0), (False, -0.5, [0.25], 2.0)]


def test_gradients_are_unscaled_and_clipped_once_per_update():
    accelerator = fp16(gradient_accumulation_steps=2)
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    norms = []
    for value in (2.0, 4.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), value)).sum())
            before = model.weight.grad.item()
            accelerator.unscale_gradients(optimizer)
            accelerator.unscale_gradients([optimizer])
            accelerator.unscale_gradients()
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.5).item())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 100.0).item())
            if not accelerator.sync_gradients:
                assert model.weight.grad.item() == before, "inside the window nothing is changed"
            optimizer.step()
            optimizer.zero_grad()
    assert norms == pytest.approx([1.0, 1.0, 3.0, 1.5], rel=1e-3)
    assert model.weight.item() == pytest.approx(1.0 - 1.5, rel=1e-3)
    with pytest.raises(NotPreparedError):
        accelerator.unscale_gradients(torch.optim.SGD(line().parameters(), lr=1.0))


def test_saving_and_loading_is_the_identity_for_the_scaler_and_runs_no_step(tmp_path):
    accelerator = fp16()
    model = line()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)

    def update(value: float) -> None:
        accelerator.backward(model(torch.full((1, 1), value)).sum())
        optimizer.step()
        optimizer.zero_grad()

    for value in (1.0, float("inf"), 1.0):
        update(value)
    before = accelerator.scaler.state_dict(), model.weight.item()
    assert before[0]["scale"] == 2.0
    assert before[0]["_growth_tracker"] == 1
    accelerator.save_state(str(tmp_path / "state"))
    update(float("inf"))
    steps = []
    optimizer.register_step_post_hook(lambda *args: steps.append(1))
    accelerator.load_state(str(tmp_path / "state"))
    assert (accelerator.scaler.state_dict(), model.weight.item()) == before
    assert steps == []
    update(1.0)
    assert accelerator.scaler.state_dict()["_growth_tracker"] == 2


# ---------------------------------------------------------------- autocast


def test_a_handler_given_to_the_call_beats_the_constructors_and_blocks_restore():
    off = AutocastKwargs(enabled=False)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    quiet = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[off])
    with accelerator.autocast():
        assert dtype_of_products() is BF16
        with accelerator.autocast(off):
            assert dtype_of_products() is FP32
            with accelerator.autocast():
                assert dtype_of_products() is BF16
            assert dtype_of_products() is FP32
        assert dtype_of_products() is BF16
    assert dtype_of_products() is FP32
    with quiet.autocast():
        assert dtype_of_products() is FP32
    with quiet.autocast(AutocastKwargs(enabled=True)):
        assert dtype_of_products() is BF16
    with accelerator.autocast(AutocastKwargs(cache_enabled=False)):
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()


def test_the_conversion_of_outputs_can_be_switched_off():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(convert_outputs=False)])
    assert accelerator.prepare(net())(torch.ones(1, 16)).dtype is BF16
    assert "outputs as computed" in accelerator.explain()


# ---------------------------------------------------------------- other entry points


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.seen: list[torch.dtype] = []
        self.inner.register_forward_hook(lambda layer, args, out: self.seen.append(out.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    encode = embed = forward


def test_usual_entry_points_and_registered_ones_compute_like_forward():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Encoder())
    x = torch.ones(1, 2)
    assert model.encode(x).dtype is model.embed(x).dtype is FP32
    assert model.seen == [BF16, FP32]
    accelerator.register_forward_method(model, "embed")
    accelerator.register_forward_method(model, "embed")
    assert model.embed(x).dtype is FP32
    assert model.seen[2:] == [BF16]
    accelerator.unwrap_model(model, keep_fp32_wrapper=False).embed(x)
    assert model.seen[3:] == [FP32]
    model.embed(x)
    assert model.seen[4:] == [BF16], "the view takes nothing from the prepared model"
    with pytest.raises(PlanError, match="Encoder has no method 'translate'"):
        accelerator.register_forward_method(model, "translate")
    with pytest.raises(SettingError, match=r"takes a torch.nn.Module, and got 3"):
        accelerator.register_forward_method(3, "embed")


def test_registered_methods_keep_no_model_alive():
    gc.collect()
    gc.disable()
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = accelerator.prepare(net())
        accelerator.register_forward_method(model, "extra_repr")
        alive = weakref.ref(model)
        model = accelerator.free_memory(model)
        assert alive() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------- 8-bit floats


def test_fp8_trains_on_cpu_by_torchao():
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    assert (accelerator.mixed_precision, accelerator.fp8_backend) == ("fp8", "AO")
    assert accelerator.ao_recipe_handler is accelerator.fp8_recipe_handler is not None
    assert accelerator.te_recipe_handler is accelerator.msamp_recipe_handler is accelerator.scaler is None
    assert "linear layers in fp8 by torchao" in accelerator.explain()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert has_ao_layers(model)
    before = [p.detach().clone() for p in model.parameters()]
    out = model(torch.randn(16, 16))
    accelerator.backward(out.pow(2).mean())
    optimizer.step()
    assert out.dtype is FP32
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    copied = pickle.loads(pickle.dumps(model))
    assert has_ao_layers(copied)


def test_the_launchers_variables_choose_the_library():
    with patch_environment(ACCELERATE_MIXED_PRECISION="fp8", ACCELERATE_FP8_BACKEND="AO"):
        assert Accelerator(cpu=True).fp8_backend == "AO"
    with (
        patch_environment(ACCELERATE_MIXED_PRECISION="fp8", ACCELERATE_FP8_BACKEND="MSAMP"),
        pytest.raises(PrecisionError, match="MS-AMP cannot be had"),
    ):
        Accelerator(cpu=True)


def test_without_fp8_there_is_no_backend():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert accelerator.fp8_backend == "NO"
    assert accelerator.fp8_recipe_handler is None


@pytest.mark.parametrize("recipe", [AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs])
def test_a_recipe_without_fp8_is_refused(recipe):
    with pytest.raises(SettingError, match=rf"{recipe.__name__}, which has no effect with mixed_precision='no'"):
        Accelerator(cpu=True, kwargs_handlers=[recipe()])


def test_recipes_that_cannot_be_had_say_what_to_use_instead():
    with pytest.raises(PrecisionError, match=r"MS-AMP cannot be had.*AORecipeKwargs"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[MSAMPRecipeKwargs()])
    with pytest.raises(ImportError, match=r"transformer-engine\[pytorch\].*AORecipeKwargs"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()])
    with pytest.raises(SettingError, match="AORecipeKwargs and TERecipeKwargs: one library"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(), AORecipeKwargs()])
    with pytest.warns(FutureWarning), pytest.raises(ImportError, match="transformer-engine"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[FP8RecipeKwargs()])
