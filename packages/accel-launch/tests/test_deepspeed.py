"""DeepSpeed's own launcher: its command, the file with variables, and its run, by a stand-in that notes what it got."""

import json
import stat

import pytest

from accel_launch import Target, make_plan, resolve_config
from accel_launch.deepspeed import ENV_FILE, env_file, written
from accel_state.errors import LaunchError

PDSH = {"use_deepspeed": True, "num_machines": 2, "num_processes": 4, "deepspeed_hostfile": "hosts"}
FLAGS = ["--use-deepspeed", "--num-machines", "2", "--num-processes", "4", "--deepspeed-hostfile", "hosts"]


def planned(target=Target("train", is_module=True), environ=None, **flags):  # noqa: B008  a value
    environ = environ or {}
    config = resolve_config(target, {**PDSH, **flags}, environ=environ, count=lambda kind, variables: 0)
    return make_plan(config, environ=environ)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "--hostfile hosts --no_local_rank --launcher pdsh --num_gpus 2 --master_port 29500"),
        (
            {"deepspeed_multinode_launcher": "openmpi", "main_process_ip": "n1", "main_process_port": 12},
            "--hostfile hosts --no_local_rank --launcher openmpi --num_gpus 2 --master_addr n1 --master_port 12",
        ),
        (
            {"deepspeed_exclusion_filter": "n1:0"},
            "--hostfile hosts --no_local_rank --launcher pdsh --exclude n1:0 --master_port 29500",
        ),
        (
            {"deepspeed_inclusion_filter": "n1@n2:0", "deepspeed_hostfile": None},
            "--no_local_rank --launcher pdsh --include n1@n2:0 --master_port 29500",
        ),
    ],
)
def test_commands(flags, words):
    (rank,) = planned(**flags).ranks
    assert " ".join(rank.command) == f"deepspeed {words} --module train"


def test_scripts_and_programs():
    assert planned(Target(__file__, ("--lr", "1"))).ranks[0].command[-4:] == ("29500", __file__, "--lr", "1")
    assert planned(Target("prog", no_python=True)).ranks[0].command[-3:] == ("29500", "--no_python", "prog")


def test_a_launch_without_its_words_is_torch_elastics():
    flags = {"deepspeed_hostfile": None, "main_process_ip": "n1", "machine_rank": 1}
    assert planned(**flags).config.value("launcher") == "elastic"
    assert planned(**flags, deepspeed_multinode_launcher="standard").config.value("launcher") == "elastic"


def test_the_plan_tells_variables_without_values_of_the_shell():
    plan = planned(environ={"TOKEN": "hush", "RANK": "3", "PS1": "a b", "EMPTY": ""}, mixed_precision="bf16")
    assert plan.as_dict()["env_file"]["inherited"] == ["TOKEN"]
    assert plan.as_dict()["env_file"]["left_out"] == ["EMPTY", "PS1"]
    assert plan.as_dict()["env_file"]["variables"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert plan.as_text().splitlines()[-1] == (
        f"file {ENV_FILE}: the variables above, and of this shell TOKEN; left out: EMPTY, PS1"
    )
    assert plan.removed == ("RANK",)
    assert "hush" not in json.dumps(plan.as_dict()) + plan.as_text()


def test_a_variable_that_a_shell_would_misread_is_refused():
    with pytest.raises(LaunchError, match=r"ACCELERATE_X='a;b' cannot be handed on"):
        env_file({"ACCELERATE_X": "a;b"}, {})


def test_the_users_own_file_keeps_its_lines_and_is_put_back(tmp_path):
    path = tmp_path / ENV_FILE
    path.write_text("NCCL_IB_DISABLE=1\nACCELERATE_USE_FSDP=true\n")
    path.chmod(0o640)
    with written(env_file({"ACCEL_X": "2"}, {"NCCL_IB_DISABLE": "0"}), tmp_path):
        assert path.read_text() == "NCCL_IB_DISABLE=0\nNCCL_IB_DISABLE=1\nACCEL_X=2\n"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == "NCCL_IB_DISABLE=1\nACCELERATE_USE_FSDP=true\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.fixture
def on_path(accel):
    """Put a program `deepspeed` on PATH that leaves its arguments and the file, and ends with 7."""
    programs = accel.folder / "bin"
    programs.mkdir()
    program = programs / "deepspeed"
    program.write_text(f'#!/bin/sh\necho "$@" >words; cp {ENV_FILE} variables; echo "no host answers" >&2; exit 7\n')
    program.chmod(0o755)
    accel.environ["PATH"] = f"{programs}:{accel.environ['PATH']}"


def test_its_launcher_is_run_and_its_end_is_ours(accel, on_path):
    accel.script("")
    done = accel("launch", *FLAGS, "--mixed-precision", "bf16", "train.py", "--lr", "1", env={"TOKEN": "hush"})
    assert done.returncode == 7 and "no host answers" in done.stderr
    assert (accel.folder / "words").read_text().startswith("--hostfile hosts --no_local_rank --launcher pdsh")
    lines = (accel.folder / "variables").read_text().splitlines()
    assert {"TOKEN=hush", "ACCELERATE_MIXED_PRECISION=bf16", "ACCELERATE_USE_DEEPSPEED=true"} <= set(lines)
    assert not (accel.folder / ENV_FILE).exists()


def test_its_launcher_is_an_extra(accel):
    accel.script("")
    done = accel("launch", *FLAGS, "train.py", env={"PATH": "/nowhere"})
    assert done.returncode == 2 and "pip install 'accel-launch[deepspeed]'" in done.stderr
    assert not (accel.folder / ENV_FILE).exists()
