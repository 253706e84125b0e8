"""Configuration files: where they lie, what they may hold, and what is refused."""

import json

import pytest

from accel_launch import Target, find_config, read_config, resolve_config
from accel_launch.files import default_config_path, peer_config_path
from accel_state.errors import LaunchError, SettingError
from accel_state.settings import Resolved

TARGET = Target("train", is_module=True)


@pytest.fixture
def write(tmp_path):
    def make(text, name="config.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return make


def resolved(path, flags=None, environ=None):
    count = lambda kind, variables: 0  # noqa: E731
    return resolve_config(TARGET, flags or {}, file=read_config(path), environ=environ or {}, count=count)


def test_flag_then_file_then_environment(write):
    path = write("mixed_precision: bf16\nnum_processes: 3\n")
    environ = {"ACCEL_MIXED_PRECISION": "fp16", "ACCEL_GRACE_S": "3"}
    config = resolved(path, {"num_processes": 2}, environ)
    assert config.settings["num_processes"] == Resolved(2, "flag --num-processes")
    assert config.settings["mixed_precision"] == Resolved("bf16", f"file {path}: mixed_precision")
    assert config.settings["grace_s"] == Resolved(3, "environment ACCEL_GRACE_S")


def test_the_file_that_is_found(write, tmp_path):
    environ = {"HOME": str(tmp_path)}
    assert find_config(None, environ).values == {}
    write("num_processes: 1\n", ".cache/huggingface/accelerate/default_config.yml")
    assert find_config(None, environ).values == {"num_processes": 1}
    write("num_processes: 2\n", ".cache/huggingface/accelerate/default_config.yaml")
    assert find_config(None, environ).values == {"num_processes": 2}
    write("num_processes: 3\n", ".config/accel/config.yaml")
    assert find_config(None, environ).values == {"num_processes": 3}
    assert find_config(str(write("num_processes: 4\n")), environ).values == {"num_processes": 4}


def test_default_locations_follow_their_variables():
    environ = {"HOME": "/home/me", "XDG_CONFIG_HOME": "/conf", "XDG_CACHE_HOME": "/cache"}
    assert str(default_config_path(environ)) == "/conf/accel/config.yaml"
    assert str(peer_config_path(environ)) == "/cache/huggingface/accelerate/default_config.yaml"
    assert str(peer_config_path({**environ, "HF_HOME": "/hf"})) == "/hf/accelerate/default_config.yaml"


def test_json_is_read_too(write):
    path = write(json.dumps({"num_processes": 2, "distributed_type": "NO"}), "config.json")
    assert read_config(path).values == {"num_processes": 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_proceses: 2", "unknown key 'num_proceses'; did you mean 'num_processes'"),
        ("fsdp_config:\n  fsdp_verison: 2", "unknown key 'fsdp_config.fsdp_verison'; did you mean 'fsdp_version'"),
        ("parallelism_config:\n  tp_sise: 2", "unknown key 'parallelism_config.tp_sise'; did you mean 'tp_size'"),
        ("fp8_config:\n  nonsense: 2", "unknown key 'fp8_config.nonsense'.* a file that a newer version wrote"),
        ("distributed_type: MULTI_GPUS", "distributed_type: 'MULTI_GPUS' is not allowed; did you mean 'MULTI_GPU'"),
        ("compute_environment: MOON", "compute_environment: 'MOON' is not allowed"),
        ("fsdp_config: 3", "fsdp_config: 3 is not allowed; give `key: value` lines"),
        ("- a\n- b", "holds a list: a configuration is a mapping"),
        ("a: 1\nb: [1,\n", "line 3, column 1"),
        ("num_processes: 1\nnum_processes: 2\n", "line 2, column 1: 'num_processes' stands here twice"),
        ("fp8_config:\n  override_linear_precision: [true]", r"fp8_override_linear_precision: \[True\] is not allowed"),
    ],
)
def test_what_is_refused(write, text, words):
    with pytest.raises(LaunchError, match=words):
        read_config(write(text))


def test_a_bad_value_names_its_place(write):
    with pytest.raises(SettingError, match=r"num_processes from file .*config.yaml: num_processes: 'two'"):
        resolved(write("num_processes: two"))


def test_files_that_cannot_be_read(write, tmp_path):
    with pytest.raises(LaunchError, match=r"absent.yaml' cannot be read: No such file"):
        find_config(str(tmp_path / "absent.yaml"), {})
    path = write("")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LaunchError, match="is not a text in UTF-8"):
        read_config(path)


def test_unquoted_no_means_the_word(write):
    config = resolved(write("mixed_precision: no\ndynamo_config:\n  dynamo_backend: no\n"))
    assert config.value("mixed_precision") == "no"
    assert config.value("dynamo_backend") == "no"


def test_sections_leave_their_prefix_out_and_lists_are_joined(write):
    path = write("fsdp_config:\n  version: 2\n  transformer_layer_cls_to_wrap: [A, B]\n  sharding_strategy: 1\n")
    assert read_config(path).values == {
        "fsdp_version": 2,
        "fsdp_transformer_layer_cls_to_wrap": "A,B",
        "fsdp_sharding_strategy": "1",
    }


def test_what_is_not_said_is_not_given(write):
    path = write("num_processes: -1\nmain_process_ip: null\ngpu_ids: ''\nfsdp_config: {}\ndeepspeed_config: null\n")
    assert read_config(path).values == {}


def test_a_flag_overrules_the_kind_of_run_in_the_file(write):
    config = resolved(write("distributed_type: MULTI_GPU\ngpu_ids: '0'\n"), {"cpu": True})
    assert config.value("multi_gpu") is False and config.value("gpu_ids") is None
    assert config.settings["multi_gpu"].origin == "default: --cpu overrules the file"
    config = resolved(write("distributed_type: FSDP\n"), {"use_deepspeed": True})
    assert (config.value("use_fsdp"), config.value("use_deepspeed")) == (False, True)


def test_sagemaker_is_refused(write):
    path = write("compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: ml.p3\niam_role_name: me\n")
    with pytest.raises(LaunchError, match="AMAZON_SAGEMAKER: such jobs cannot be started from here"):
        resolved(path)


def test_deepspeed_is_told_what_the_file_gave(write, accel):
    write("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  gradient_clipping: 1\n")
    accel.script("import os; print(os.environ['ACCELERATE_CONFIG_DS_FIELDS'])")
    done = accel("launch", "--config_file", "config.yaml", "train.py")
    assert (done.stdout, done.stderr) == ("zero_stage,gradient_clipping\n", "")
