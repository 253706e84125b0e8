"""Where a setting's value comes from, and what is refused."""

import enum

import pytest

from accel_state.errors import SettingError
from accel_state.settings import (
    UNSET,
    Resolved,
    all_settings,
    find_setting,
    resolve,
    setting,
    unknown_variables,
    worker_environment,
)
from accel_state.settings.model import define


def test_argument_beats_environment_beats_default():
    environ = {"ACCEL_GRADIENT_ACCUMULATION_STEPS": "4"}
    key = "gradient_accumulation_steps"
    assert resolve(key, 8, environ=environ) == Resolved(8, "argument")
    assert resolve(key, environ=environ) == Resolved(4, "environment ACCEL_GRADIENT_ACCUMULATION_STEPS")
    assert resolve(key, environ={}) == Resolved(1, "default")


def test_an_argument_that_equals_the_default_still_counts():
    environ = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    assert resolve("gradient_accumulation_steps", 1, environ=environ) == Resolved(1, "argument")
    assert resolve("cpu", False, environ={"ACCEL_USE_CPU": "1"}) == Resolved(False, "argument")


@pytest.mark.parametrize("nothing", [UNSET, None])
def test_nothing_given_looks_further(nothing):
    assert resolve("mixed_precision", nothing, environ={"ACCELERATE_MIXED_PRECISION": "bf16"}).value == "bf16"


def test_our_name_beats_the_other_and_the_origin_says_so():
    both = {"ACCEL_MIXED_PRECISION": "bf16", "ACCELERATE_MIXED_PRECISION": "fp16"}
    value, origin = resolve("mixed_precision", environ=both)
    assert value == "bf16"
    assert origin == "environment ACCEL_MIXED_PRECISION (over ACCELERATE_MIXED_PRECISION='fp16')"
    same = {"ACCEL_MIXED_PRECISION": "bf16", "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert resolve("mixed_precision", environ=same).origin == "environment ACCEL_MIXED_PRECISION"


def test_an_empty_variable_is_not_set():
    assert resolve("mixed_precision", environ={"ACCEL_MIXED_PRECISION": ""}) == Resolved("no", "default")


def test_the_environment_is_read_when_asked(monkeypatch):
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "INFO")
    assert setting("log_level") == "info"
    monkeypatch.delenv("ACCELERATE_LOG_LEVEL")
    assert setting("log_level") is None


@pytest.mark.parametrize("text", ["1", "true", "True", "YES", " on "])
def test_words_for_true(text):
    assert resolve("cpu", environ={"ACCEL_USE_CPU": text}).value is True


@pytest.mark.parametrize("text", ["0", "false", "False", "NO", "off"])
def test_words_for_false(text):
    assert resolve("cpu", environ={"ACCEL_USE_CPU": text}).value is False


def test_an_enum_member_stands_for_its_value():
    class Precision(enum.Enum):
        BF16 = "bf16"

    assert setting("mixed_precision", Precision.BF16) == "bf16"


@pytest.mark.parametrize(
    ("key", "variable", "text", "allowed"),
    [
        ("cpu", "ACCEL_USE_CPU", "maybe", "one of 1, true, yes, on or 0, false, no, off"),
        ("mixed_precision", "ACCELERATE_MIXED_PRECISION", "fp17", "one of no, fp16, bf16, fp8"),
        ("gradient_accumulation_steps", "ACCEL_GRADIENT_ACCUMULATION_STEPS", "0", "an integer of at least 1"),
        ("gradient_accumulation_steps", "ACCEL_GRADIENT_ACCUMULATION_STEPS", "two", "an integer of at least 1"),
        ("main_process_port", "ACCEL_MAIN_PROCESS_PORT", "65536", "an integer from 0 to 65535"),
    ],
)
def test_a_bad_variable_is_named_with_its_value_and_what_is_allowed(key, variable, text, allowed):
    with pytest.raises(SettingError) as caught:
        resolve(key, environ={variable: text})
    assert str(caught.value) == f"{key} from environment {variable}: {text!r} is not allowed; give {allowed}"


@pytest.mark.parametrize(("key", "value"), [("num_processes", True), ("num_processes", 1.5), ("torch_device", 3)])
def test_an_argument_of_another_type_is_refused(key, value):
    with pytest.raises(SettingError, match=key):
        resolve(key, value, environ={})


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(SettingError, match="'mixed_precison'; did you mean 'mixed_precision'"):
        find_setting("mixed_precison")


def test_workers_read_back_what_they_were_handed():
    told = {"cpu": True, "mixed_precision": "bf16", "gradient_accumulation_steps": 3, "num_processes": 2}
    handed = worker_environment({**told, "log_level": None})
    assert handed["ACCEL_USE_CPU"] == handed["ACCELERATE_USE_CPU"] == "true"
    assert "ACCEL_NUM_PROCESSES" not in handed  # the launcher's own business
    assert "ACCEL_LOG_LEVEL" not in handed
    for key in ("cpu", "mixed_precision", "gradient_accumulation_steps"):
        assert resolve(key, environ=handed).value == told[key]


def test_an_unknown_variable_is_reported_with_the_nearest_name():
    warnings = unknown_variables(
        {"ACCEL_MIXED_PRECISON": "bf16", "ACCEL_USE_CPU": "1", "ACCELERATE_X": "", "HOME": "", "ACCEL_ZZZZZZ": "1"}
    )
    assert warnings == [
        "ACCEL_MIXED_PRECISON is set but nothing reads it; did you mean 'ACCEL_MIXED_PRECISION'?",
        "ACCEL_ZZZZZZ is set but nothing reads it",
    ]


def test_names_follow_from_the_key():
    row = define("some_number", int, 3, "A number.")
    assert row.env == "ACCEL_SOME_NUMBER"
    assert row.fallback_env == ("ACCELERATE_SOME_NUMBER",)
    assert row.flags == ("--some-number", "--some_number")
    assert row.yaml == "some_number"
    assert define("word", str, None, "A word.").flags == ("--word",)


def test_the_table_is_consistent():
    rows = all_settings()
    for names in (
        [row.key for row in rows],
        [name for row in rows for name in (row.env, *row.fallback_env)],
        [flag for row in rows for flag in row.flags],
        [row.yaml for row in rows],
    ):
        assert len(names) == len(set(names))
    for row in rows:
        assert row.doc.endswith(".")
        assert row.default is None or row.parse(row.default, "default") == row.default


def test_unset_is_falsy_and_says_what_it_is():
    assert not UNSET
    assert repr(UNSET) == "<unset>"


@pytest.mark.parametrize(
    ("key", "variable", "text", "value"),
    [
        ("fsdp_version", "FSDP_VERSION", "2", 2),
        ("fsdp_transformer_layer_cls_to_wrap", "FSDP_TRANSFORMER_CLS_TO_WRAP", "A,B", "A,B"),
        ("fsdp_offload_params", "FSDP_OFFLOAD_PARAMS", "true", True),
        ("parallelism_config_tp_size", "PARALLELISM_CONFIG_TP_SIZE", "4", 4),
        ("parallelism_config_cp_comm_strategy", "PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall", "alltoall"),
        ("dynamo_use_dynamic", "ACCELERATE_DYNAMO_USE_DYNAMIC", "True", True),
        ("zero_stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "3", 3),
        ("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING", "1.5", 1.5),
        ("megatron_lm_pp_degree", "MEGATRON_LM_PP_DEGREE", "2", 2),
        ("megatron_lm_hidden_dropout", "MEGATRON_LM_HIDDEN_DROPOUT", "0.1", 0.1),
        ("fp8_margin", "ACCELERATE_FP8_MARGIN", "1", 1),
        ("cpu_affinity", "ACCELERATE_CPU_AFFINITY", "1", True),
    ],
)
def test_what_the_peers_launcher_hands_on_is_read(key, variable, text, value):
    assert resolve(key, environ={variable: text}) == Resolved(value, f"environment {variable}")
    assert resolve(key, environ={find_setting(key).env: text}).value == value
    handed = worker_environment({key: value})
    assert variable in handed and resolve(key, environ=handed).value == value
    assert resolve(key, environ={}).value == find_setting(key).default


def test_a_number_that_is_none_is_refused():
    with pytest.raises(SettingError, match=r"gradient_clipping from .*'much' is not allowed; give a number"):
        resolve("gradient_clipping", environ={"ACCEL_GRADIENT_CLIPPING": "much"})


def test_unknown_variables_warn_once_when_a_state_is_made(fresh_state, monkeypatch):
    from accel_state import PartialState
    from accel_state.settings import resolution

    resolution._warn_once.cache_clear()
    monkeypatch.setenv("ACCEL_MIXED_PRECISON", "bf16")
    monkeypatch.setenv("ACCEL_TEST_SOMETHING", "1")
    with pytest.warns(UserWarning, match="did you mean 'ACCEL_MIXED_PRECISION'") as caught:
        PartialState(cpu=True)
    assert len(caught) == 1
    PartialState._reset_state()
    PartialState(cpu=True)  # a second warning would be an error
