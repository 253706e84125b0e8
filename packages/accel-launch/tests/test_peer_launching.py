"""The peer's helpers around a launch."""

import os
import sys

from accel_launch import TORCH_LAUNCH_PARAMS, launch_command_parser, prepare_simple_launcher_cmd_env
from accel_launch import test_launch as check_launch


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
