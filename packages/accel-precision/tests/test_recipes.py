import pytest

import accel_precision.fp8.backend as backend
from accel_precision import (
    AORecipeKwargs,
    FP8BackendType,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    PrecisionPolicy,
    TERecipeKwargs,
    fp8_backend,
)
from accel_state import patch_environment
from accel_state.errors import MissingExtraError, PrecisionError


@pytest.fixture
def libraries(monkeypatch):
    """Says which libraries are installed."""

    def install(*, ao: bool, te: bool) -> None:
        monkeypatch.setattr(backend, "is_torchao_available", lambda: ao)
        monkeypatch.setattr(backend, "is_transformer_engine_available", lambda: te)

    return install


def test_fields_left_open_take_their_defaults():
    te = TERecipeKwargs()
    assert (te.use_autocast_during_eval, te.margin, te.interval, te.fp8_format) == (False, 0, 1, "HYBRID")
    assert (te.amax_history_len, te.amax_compute_algo, te.scaling) == (1024, "most_recent", "delayed")
    assert te.override_linear_precision == (False, False, False)
    ao = AORecipeKwargs()
    assert (ao.config, ao.pad_inner_dim, ao.enable_fsdp_float8_all_gather) == (None, True, True)
    assert MSAMPRecipeKwargs().opt_level == "O2"


def test_fields_left_open_are_read_from_the_launchers_variables():
    with patch_environment(
        ACCELERATE_FP8_FORMAT="e4m3",
        ACCELERATE_FP8_MARGIN="2",
        ACCELERATE_FP8_AMAX_COMPUTE_ALGO="max",
        ACCELERATE_FP8_OVERRIDE_DGRAD="true",
        ACCELERATE_FP8_PAD_INNER_DIM="false",
        ACCELERATE_FP8_OPT_LEVEL="O1",
    ):
        te, ao = TERecipeKwargs(), AORecipeKwargs(enable_fsdp_float8_all_gather=False)
        assert (te.fp8_format, te.margin, te.amax_compute_algo) == ("E4M3", 2, "max")
        assert te.override_linear_precision == (False, True, False)
        assert (ao.pad_inner_dim, ao.enable_fsdp_float8_all_gather) == (False, False)
        assert MSAMPRecipeKwargs().opt_level == "O1"
        assert TERecipeKwargs(margin=1).margin == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp8_format": "E3M4"}, r"fp8_format='E3M4'.*'HYBRID', 'E4M3', 'E5M2'"),
        ({"amax_compute_algo": "mean"}, "amax_compute_algo='mean'"),
        ({"override_linear_precision": (True,)}, "three bools"),
        ({"recipe": "static"}, r"recipe='static'.*'delayed', 'current', 'block', 'mxfp8'"),
        ({"recipe": "block", "use_mxfp8_block_scaling": True}, "contradicts recipe='block'"),
        ({"recipe": "current", "margin": 3}, "margin belong to delayed scaling and have no effect with 'current'"),
        ({"recipe": object(), "amax_history_len": 3}, "no effect with a ready recipe"),
    ],
)
def test_values_that_could_not_be_honoured_are_refused(options, message):
    with pytest.raises(PrecisionError, match=message):
        TERecipeKwargs(**options)


def test_unknown_levels_and_backends_are_refused():
    with pytest.raises(PrecisionError, match=r"opt_level='O9'.*'O1', 'O2'"):
        MSAMPRecipeKwargs("O9")
    with pytest.warns(FutureWarning), pytest.raises(PrecisionError, match="backend='AO'"):
        FP8RecipeKwargs(backend="ao")
    with (
        patch_environment(ACCELERATE_FP8_BACKEND="tpu"),
        pytest.raises(PrecisionError, match=r"'tpu' \(environment ACCELERATE_FP8_BACKEND\).*'AO', 'TE', 'MSAMP'"),
    ):
        fp8_backend()


def test_the_old_recipe_becomes_that_of_its_library():
    with pytest.warns(FutureWarning, match="AORecipeKwargs or TERecipeKwargs"):
        old = FP8RecipeKwargs(fp8_format="E4M3", amax_history_len=16)
    assert old.specific() == TERecipeKwargs(fp8_format="E4M3", amax_history_len=16)
    with pytest.warns(FutureWarning):
        assert FP8RecipeKwargs(backend="msamp", opt_level="O1").specific() == MSAMPRecipeKwargs("O1")


def test_msamp_is_refused_with_what_to_use_instead():
    with pytest.raises(PrecisionError, match=r"no longer published.*AORecipeKwargs.*'bf16'"):
        fp8_backend(MSAMPRecipeKwargs())


def test_without_a_recipe_the_setting_and_then_what_is_installed_decide(libraries):
    libraries(ao=True, te=True)
    assert fp8_backend().kind is FP8BackendType.TE
    with patch_environment(ACCELERATE_FP8_BACKEND="ao"):
        assert fp8_backend().kind is FP8BackendType.AO
    libraries(ao=True, te=False)
    assert fp8_backend().kind is FP8BackendType.AO
    libraries(ao=False, te=False)
    with pytest.raises(MissingExtraError, match=r"none is installed.*accel-precision\[torchao\].*'bf16'"):
        fp8_backend()


def test_a_recipe_whose_library_is_missing_says_how_to_install_it(libraries):
    libraries(ao=False, te=False)
    with pytest.raises(ImportError, match=r"accel-precision\[torchao\]"):
        PrecisionPolicy.from_name("fp8", AORecipeKwargs())
    with pytest.raises(ImportError, match=r"transformer-engine\[pytorch\].*AORecipeKwargs"):
        PrecisionPolicy.from_name("fp8", TERecipeKwargs())


def test_a_recipe_without_fp8_is_refused():
    with pytest.raises(PrecisionError, match="AORecipeKwargs has no effect with mixed_precision='bf16'"):
        PrecisionPolicy.from_name("bf16", AORecipeKwargs())
