"""The peer's helpers around a launch."""

import os
import subprocess
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest

from accel_launch import (
    TORCH_LAUNCH_PARAMS,
    install_xla,
    launch_command_parser,
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env,
    prepare_tpu,
)
from accel_launch import test_launch as check_launch
from accel_state.errors import LaunchError

PDSH = ["--use_deepspeed", "--num_machines", "2", "--num_processes", "4", "--deepspeed_hostfile", "hosts"]


@pytest.fixture
def parsed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return lambda *words: launch_command_parser().parse_args([*words, "train.py", "--lr", "1"])


def test_a_launch_of_one_process_as_command_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SOMETHING", "else")
    script = tmp_path / "train.py"
    script.touch()
    args = launch_command_parser().parse_args(["--cpu", "--mixed_precision", "bf16", str(script), "--lr", "1"])
    command, environment = prepare_simple_launcher_cmd_env(args)
    assert command == [sys.executable, "-u", str(script), "--lr", "1"]
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16" and environment["SOMETHING"] == "else"
    assert "RANK" not in environment or environment["RANK"] == os.environ["RANK"]


def test_torchruns_arguments_are_named():
    assert {"nnodes", "tee", "master_port"} <= set(TORCH_LAUNCH_PARAMS)


def test_a_process_finds_its_place(monkeypatch):
    monkeypatch.setenv("ACCEL_USE_CPU", "true")
    check_launch()


def test_torchrun_is_told_by_the_arguments(parsed):
    args = parsed("--num_processes", "2", "--mixed_precision", "bf16")
    environment = prepare_multi_gpu_env(args)
    assert (args.nproc_per_node, args.master_port) == ("2", "29500") and not hasattr(args, "nnodes")
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16" and environment["PATH"] == os.environ["PATH"]
    assert environment.get("WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    args = parsed(
        *("--num_machines", "2", "--machine_rank", "1", "--num_processes", "4"),
        *("--main_process_ip", "n1", "--main_process_port", "12"),
    )
    prepare_multi_gpu_env(args)
    assert (args.nproc_per_node, args.nnodes, args.node_rank, args.rdzv_endpoint) == ("2", "2", 1, "n1:12")


def test_deepspeeds_launcher_as_command_and_environment(parsed, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    command, environment = prepare_deepspeed_cmd_env(parsed(*PDSH, "--main_process_ip", "n1", "--zero_stage", "2"))
    words = (
        "deepspeed --hostfile hosts --no_local_rank --launcher pdsh --num_gpus 2 --master_addr n1 --master_port 29500"
    )
    assert command == [*words.split(), "train.py", "--lr", "1"]
    assert environment["PYTHONPATH"] == f"/mine:{tmp_path}"
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"


def test_without_deepspeeds_launcher_torchrun_is_told(parsed):
    args = parsed("--use_deepspeed", "--num_processes", "2")
    command, environment = prepare_deepspeed_cmd_env(args)
    assert command is None and args.nproc_per_node == "2"
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["--mixed_precision", "bf16"], {"XLA_USE_BF16": "1"}),
        (["--mixed_precision", "bf16", "--downcast_bf16"], {"XLA_DOWNCAST_BF16": "1"}),
        (["--debug"], {"ACCELERATE_DEBUG_MODE": "true", "ACCEL_DEBUG_MODE": "true"}),
        ([], {}),
    ],
)
def test_tpus_get_their_variables(parsed, words, variables):
    args = parsed("--tpu", *words)
    assert prepare_tpu(args, {"X": "1"}) == (args, {"X": "1", **variables})


def test_a_pod_gets_its_name_and_machines(parsed):
    args = parsed("--tpu")
    args.tpu_name, args.tpu_vm = "pod", ["v1"]
    found, _ = prepare_tpu(args, {}, pod=True)
    assert (found.tpu, found.vm) == ("pod", ["v1"])
    with pytest.raises(LaunchError, match="tpu_name is missing"):
        prepare_tpu(parsed("--tpu"), {}, pod=True)


def test_sagemaker_is_refused(parsed):
    with pytest.raises(LaunchError, match=r"make 'train.py' the entry point"):
        prepare_sagemager_args_inputs(object(), parsed())


def test_xla_is_installed_in_colab_alone(monkeypatch):
    with pytest.raises(RuntimeError, match="notebooks of Google Colab"):
        install_xla()
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    monkeypatch.setattr(metadata, "version", {"torch": "2.13.0+cpu"}.get)
    asked = []
    monkeypatch.setattr(
        subprocess, "run", lambda words, check: asked.append(words[4:]) or SimpleNamespace(returncode=0)
    )
    install_xla()
    install_xla(upgrade=True)
    assert asked == [["torch_xla[tpu]==2.13.*"], ["--upgrade", "torch", "torch_xla[tpu]"]]
    monkeypatch.setattr(subprocess, "run", lambda words, check: SimpleNamespace(returncode=1))
    with pytest.raises(RuntimeError, match=r"pip could not install torch_xla\[tpu\]==2.13.\*"):
        install_xla()
