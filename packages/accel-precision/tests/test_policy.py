import pytest
import torch
from torch import nn

import accel_precision.capability as capability
from accel_precision import (
    AORecipeKwargs,
    AutocastKwargs,
    GradScaler,
    GradScalerKwargs,
    PrecisionPolicy,
    require_dtype,
    supports_dtype,
)
from accel_state.errors import PrecisionError


def test_names_give_policies_and_back():
    for name, dtype in (("no", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        policy = PrecisionPolicy.from_name(name)
        assert (policy.name, policy.compute, policy.params, policy.output) == (
            name,
            dtype,
            torch.float32,
            torch.float32,
        )
    assert PrecisionPolicy.from_name("BF16") == PrecisionPolicy(compute=torch.bfloat16)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(
        PrecisionError, match=r"'bf61' is unknown.*\['no', 'fp8', 'fp16', 'bf16'\].*Did you mean 'bf16'"
    ):
        PrecisionPolicy.from_name("bf61")


def test_fp8_needs_bf16_around_it():
    backend = PrecisionPolicy.from_name("fp8", AORecipeKwargs()).fp8
    with pytest.raises(PrecisionError, match=r"compute=torch.float16 is not allowed with fp8: use torch.bfloat16"):
        PrecisionPolicy(compute=torch.float16, fp8=backend)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compute", torch.float64),
        ("params", torch.bfloat16),
        ("reduce", torch.bfloat16),
        ("output", torch.bfloat16),
    ],
)
def test_types_that_could_not_be_honoured_are_refused(field, value):
    with pytest.raises(PrecisionError, match=f"{field}=torch"):
        PrecisionPolicy(**{field: value})


def test_autocast_computes_in_the_policys_type_and_restores():
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    for name in ("fp16", "bf16"):
        policy = PrecisionPolicy.from_name(name)
        with policy.autocast("cpu"):
            assert layer(x).dtype is policy.compute
        assert layer(x).dtype is torch.float32


def test_disabled_handler_computes_fp32_inside_any_autocast():
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    off = AutocastKwargs(enabled=False)
    for name in ("no", "bf16"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with PrecisionPolicy.from_name(name).autocast("cpu", off):
                assert layer(x).dtype is torch.float32
            assert layer(x).dtype is torch.bfloat16


def test_without_mixed_precision_autocast_does_nothing():
    with PrecisionPolicy.from_name("no").autocast("cpu"):
        assert not torch.is_autocast_enabled("cpu")


def test_cache_switch_reaches_autocast():
    with PrecisionPolicy.from_name("bf16").autocast("cpu", AutocastKwargs(cache_enabled=False)):
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()


def test_only_fp16_gets_a_scaler():
    assert PrecisionPolicy.from_name("no").scaler("cpu") is None
    assert PrecisionPolicy.from_name("bf16").scaler("cpu") is None
    scaler = PrecisionPolicy.from_name("fp16").scaler("cpu", GradScalerKwargs(init_scale=8.0, growth_interval=3))
    assert isinstance(scaler, GradScaler)
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.is_enabled()) == (8.0, 3, True)


def test_scaler_options_without_effect_are_announced():
    with pytest.warns(UserWarning, match="no effect with mixed_precision='bf16'"):
        PrecisionPolicy.from_name("bf16").scaler("cpu", GradScalerKwargs())


@pytest.mark.parametrize(
    "options", [{"init_scale": 0.0}, {"growth_factor": 1.0}, {"backoff_factor": 1.5}, {"growth_interval": 0}]
)
def test_scaler_options_that_cannot_work_are_refused(options):
    with pytest.raises(PrecisionError, match=next(iter(options))):
        GradScalerKwargs(**options)


def test_cpu_computes_in_every_type():
    assert all(supports_dtype(dtype, "cpu") for dtype in (torch.float32, torch.float16, torch.bfloat16))


def test_a_device_without_bf16_is_refused_with_what_it_has(monkeypatch):
    monkeypatch.setattr(capability, "supports_dtype", lambda dtype, device_type: dtype is not torch.bfloat16)
    with pytest.raises(PrecisionError, match=r"'bf16' asks for torch.bfloat16 on 'cuda'.*'fp16' or 'no'"):
        require_dtype(torch.bfloat16, "cuda")


def test_a_device_is_asked_whether_it_has_bf16(monkeypatch):
    class Old:
        @staticmethod
        def is_bf16_supported():
            return False

    monkeypatch.setattr(torch, "get_device_module", lambda device_type: Old)
    assert not supports_dtype(torch.bfloat16, "cuda")
    assert supports_dtype(torch.float16, "cuda")


def test_a_device_without_autocast_has_no_half_precision():
    assert not supports_dtype(torch.float16, "meta")
    with pytest.raises(PrecisionError, match="use mixed_precision='no'"):
        require_dtype(torch.float16, "meta")
