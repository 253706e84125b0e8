"""Several machines: Slurm, MPI and TPU pods, as commands that nobody runs here."""

import sys

import pytest

from accel_launch import Target, make_plan, resolve_config
from accel_launch.mpi import mpi_command
from accel_launch.slurm import Batch, batch_script, srun_command
from accel_state.errors import LaunchError

TARGET = Target("train", is_module=True)
STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "0",
}
BATCH = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n[1-2]"}


def resolved(flags, environ=None):
    return resolve_config(TARGET, {"cpu": True, **flags}, environ=environ or {}, count=lambda kind, variables: 0)


def test_a_task_of_srun_finds_its_place():
    config = resolved({"num_processes": 4}, STEP)
    found = {key: config.value(key) for key in ("launcher", "num_machines", "machine_rank", "main_process_ip")}
    assert found == {"launcher": "elastic", "num_machines": 2, "machine_rank": 1, "main_process_ip": "n1"}
    assert config.settings["machine_rank"].origin == "environment SLURM_*"
    assert [rank.environment["RANK"] for rank in make_plan(config, environ=STEP).ranks] == ["2", "3"]


def test_flags_beat_slurm():
    assert resolved({"main_process_ip": "other"}, STEP).value("main_process_ip") == "other"


def test_several_tasks_on_a_machine_are_refused():
    environ = {**STEP, "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"}
    with pytest.raises(LaunchError, match="srun started 4 launchers on 2 machines: start one on each"):
        resolved({}, environ)


def test_a_batch_script_on_several_machines_starts_one_launcher_on_each():
    config = resolved({}, BATCH)
    assert config.settings["launcher"] == ("srun", "default: a batch script on 2 machines of Slurm")
    command = srun_command(config, ["launch", "--cpu", "train.py"])
    assert command[:7] == ("srun", "--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1")
    assert command[-6:] == (sys.executable, "-m", "accel_launch", "launch", "--cpu", "train.py")
    with pytest.raises(LaunchError, match="start it as `accel launch`, not from Python"):
        make_plan(config)


def test_a_batch_script_can_be_printed(accel):
    done = accel("slurm", "--machines", "2", "--processes", "4", "--time", "1:00:00", "--", "--cpu", "train.py", "a b")
    assert done.stdout == batch_script(Batch(machines=2, processes=4, time="1:00:00"), ["--cpu", "train.py", "a b"])
    lines = done.stdout.splitlines()
    assert {"#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --time=1:00:00"} <= set(lines)
    assert lines[-1].endswith("-m accel_launch launch --num-processes 4 --cpu train.py 'a b'")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--machines", "2", "--", "train.py"], "--processes 1 cannot be spread evenly over --machines 2"),
        ([], "what to launch is missing"),
        (["--machines", "0", "--", "train.py"], "argument --machines"),
    ],
)
def test_batch_scripts_that_are_refused(accel, arguments, words):
    done = accel("slurm", *arguments)
    assert done.returncode == 2 and words in done.stderr


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "openmpi",
            "mpirun -np 4 --hostfile hosts --map-by ppr:2:node --bind-to none -x A -x MASTER_ADDR -x MASTER_PORT",
        ),
        ("hydra", "mpirun -n 4 -ppn 2 -f hosts -genvlist A,MASTER_ADDR,MASTER_PORT"),
        ("mvapich", "mpirun -np 4 -hostfile hosts A=1 MASTER_ADDR=n7 MASTER_PORT=29500"),
    ],
)
def test_each_mpi_is_spoken_to_in_its_words(kind, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("# a comment\nn7:2\nn8:2\n")
    config = resolved({"num_processes": 4, "num_machines": 2, "mpirun_hostfile": "hosts"})
    command, variables = mpi_command(config, ("script",), {"A": "1"}, kind)
    assert " ".join(command) == f"{words} script"
    assert variables == {"A": "1", "MASTER_ADDR": "n7", "MASTER_PORT": "29500"}


def test_host_files_that_name_nobody(tmp_path):
    with pytest.raises(LaunchError, match="cannot be read"):
        mpi_command(resolved({"mpirun_hostfile": "absent"}), ("x",), {}, "openmpi")
    (tmp_path / "hosts").touch()
    with pytest.raises(LaunchError, match="names no host"):
        mpi_command(resolved({"mpirun_hostfile": str(tmp_path / "hosts")}), ("x",), {}, "openmpi")


def test_a_pod_is_told_by_gcloud(accel):
    (accel.folder / "c.yaml").write_text("distributed_type: XLA\ntpu_name: pod\ntpu_zone: here\ncommands: [ls, pwd]\n")
    done = accel("tpu-config", "--config_file", "c.yaml", "--debug")
    start = "Running gcloud compute tpus tpu-vm ssh pod --zone here --command cd /usr/share; "
    assert done.stdout == f"{start}ls; pwd --worker all\n"
    done = accel("tpu-config", "--config_file", "c.yaml", "--debug", "--command", "df -h", "--install_accelerate")
    assert done.stdout == f"{start}pip install -U accelerate; df -h --worker all\n"
    for arguments, words in (
        ([], "--tpu-name is missing"),
        (["--tpu_name", "a", "--tpu_zone", "b"], "commands are missing"),
    ):
        done = accel("tpu-config", "--debug", *arguments)
        assert done.returncode == 2 and words in done.stderr
