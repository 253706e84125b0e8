"""What a launch resolves to, on machines made up here."""

import pytest

from accel_launch import Target, resolve_config
from accel_state.errors import LaunchError, SettingError
from accel_state.settings import Resolved

TARGET = Target(__file__)
PDSH = {"use_deepspeed": True, "num_machines": 2, "num_processes": 4, "deepspeed_hostfile": "hosts"}


def resolved(flags=None, *, environ=None, num_gpus=0, platform="linux", target=TARGET):
    def count(kind, variables):
        visible = variables.get("CUDA_VISIBLE_DEVICES")
        return num_gpus if visible is None else len([part for part in visible.split(",") if int(part) < num_gpus])

    return resolve_config(target, flags or {}, environ=environ or {}, count=count, platform=platform)


@pytest.mark.parametrize(
    ("flags", "num_gpus", "found"),
    [
        ({}, 0, Resolved(1, "default: no GPUs visible")),
        ({}, 1, Resolved(1, "default: 1 GPU visible")),
        ({}, 4, Resolved(4, "default: 4 GPUs visible")),
        ({"cpu": True}, 4, Resolved(1, "default: --cpu")),
        ({"gpu_ids": "0, 2"}, 4, Resolved(2, "default: 2 GPUs visible")),
        ({"gpu_ids": "all"}, 4, Resolved(4, "default: 4 GPUs visible")),
        ({"num_processes": 2}, 4, Resolved(2, "flag --num-processes")),
        ({"num_processes": 2, "cpu": True}, 1, Resolved(2, "flag --num-processes")),
        ({"num_processes": 3}, 0, Resolved(3, "flag --num-processes")),
    ],
)
def test_number_of_processes(flags, num_gpus, found):
    assert resolved(flags, num_gpus=num_gpus).settings["num_processes"] == found


def test_flag_then_environment_then_default():
    environ = {"ACCELERATE_NUM_PROCESSES": "3", "ACCEL_MIXED_PRECISION": "fp16"}
    config = resolved({"mixed_precision": "bf16"}, environ=environ)
    assert config.settings["mixed_precision"] == Resolved("bf16", "flag --mixed-precision")
    assert config.settings["num_processes"] == Resolved(3, "environment ACCELERATE_NUM_PROCESSES")
    assert config.settings["grace_s"] == Resolved(10, "default")


def test_an_explicit_false_beats_the_environment():
    assert resolved({"cpu": False}, environ={"ACCEL_USE_CPU": "1"}).value("cpu") is False


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        ({"cpu": True, "multi_gpu": True}, {}, "--cpu and --multi-gpu contradict"),
        ({"cpu": True, "gpu_ids": "0"}, {}, "--cpu and --gpu-ids 0 contradict"),
        ({"multi_gpu": True}, {"ACCEL_USE_CPU": "yes"}, "ACCEL_USE_CPU=true and --multi-gpu contradict"),
        ({"gpu_ids": "0"}, {"ACCELERATE_TORCH_DEVICE": "cpu"}, "ACCELERATE_TORCH_DEVICE=cpu and --gpu-ids 0"),
        ({"num_processes": 3}, {}, "--num-processes 3: 2 GPUs are visible"),
        ({"gpu_ids": "0,7"}, {}, "--gpu-ids 0,7: only 1 of them"),
        ({"num_machines": 2}, {}, "--num-machines 2: --main-process-ip is missing"),
        ({"num_machines": 2, "main_process_ip": "a"}, {}, "--num-machines 2: --machine-rank is missing"),
        ({"num_machines": 2, "machine_rank": 2}, {}, "--machine-rank 2 .* the last machine is 1"),
        ({"num_machines": 2, "min_machines": 3}, {}, "--min-machines 3 contradicts --num-machines 2"),
        ({"num_machines": 2, "launcher": "spawn"}, {}, "--num-machines 2 needs --launcher elastic"),
        ({"max_restarts": 1, "launcher": "spawn"}, {}, "--max-restarts 1 needs --launcher elastic"),
        ({"max_restarts": 1, "launcher": "mpi", "num_processes": 2}, {}, "--max-restarts 1: mpirun starts .* once"),
        ({"num_machines": 2, "num_processes": 3, "launcher": "mpi"}, {}, "--num-processes 3 cannot be spread evenly"),
        ({"rdzv_id": "x"}, {}, "--rdzv-id x is for --launcher elastic"),
        ({"launcher": "ray"}, {}, "--launcher ray: --num-processes is missing"),
        ({"launcher": "ray", "num_processes": 2, "main_process_ip": "a"}, {}, "--main-process-ip a: Ray starts"),
        ({"launcher": "ray", "num_processes": 2, "max_restarts": 1}, {}, "--max-restarts 1: Ray starts"),
        ({"launcher": "ray", "num_processes": 2, "gpu_ids": "0"}, {}, "--gpu-ids 0: Ray starts"),
        ({"launcher": "srun"}, {}, "not inside an allocation of Slurm"),
        ({"tpu": True}, {}, "--tpu: the engine for TPUs does not exist"),
        ({"use_fsdp": True, "use_deepspeed": True}, {}, "--use-fsdp and --use-deepspeed contradict"),
        ({"deepspeed_hostfile": "x"}, {}, "--deepspeed-hostfile x is for DeepSpeed's own .* the launcher is spawn"),
        ({"deepspeed_multinode_launcher": "pdsh"}, {}, "--deepspeed-multinode-launcher pdsh is for DeepSpeed's own"),
        ({"launcher": "deepspeed"}, {}, "--launcher deepspeed: needs --use-deepspeed and several machines"),
        ({**PDSH, "deepspeed_multinode_launcher": "standard", "launcher": "deepspeed"}, {}, "standard contradicts"),
        ({**PDSH, "machine_rank": 1}, {}, "--machine-rank 1: DeepSpeed's launcher starts all machines from the first"),
        (
            {**PDSH, "deepspeed_exclusion_filter": "n1", "deepspeed_inclusion_filter": "n2"},
            {},
            "--deepspeed-exclusion-filter n1 and --deepspeed-inclusion-filter n2 contradict each other",
        ),
        ({"machine_rank": 1}, {}, "--machine-rank 1 contradicts --num-machines 1"),
    ],
)
def test_contradictions(flags, environ, words):
    with pytest.raises(LaunchError, match=words):
        resolved(flags, environ=environ, num_gpus=2)


def test_multi_gpu_without_one():
    with pytest.raises(LaunchError, match=r"no GPU is visible here \(CUDA_VISIBLE_DEVICES=''\); use --cpu"):
        resolve_config(TARGET, {"multi_gpu": True}, environ={"CUDA_VISIBLE_DEVICES": ""}, count=lambda kind, environ: 0)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_one_process_where_more_is_not_supported(platform):
    assert resolved(platform=platform).value("num_processes") == 1
    with pytest.raises(LaunchError, match="--num-processes 2: on macOS and Windows"):
        resolved({"num_processes": 2}, platform=platform)


def test_a_bad_variable_is_named():
    with pytest.raises(SettingError, match="num_processes from environment ACCEL_NUM_PROCESSES: 'two'"):
        resolved(environ={"ACCEL_NUM_PROCESSES": "two"})


def test_a_missing_script_names_the_nearest(tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=r"no script 'trian.py' in .*; did you mean 'train.py'"):
        resolved(target=Target("trian.py"))
    with pytest.raises(LaunchError, match=r"directory without a __main__\.py"):
        resolved(target=Target("folder"))
    with pytest.raises(LaunchError, match=r"no script 'absent/train\.py'"):
        resolved(target=Target("absent/train.py"))


def test_a_folder_or_module_or_program_can_be_run(tmp_path):
    (tmp_path / "__main__.py").touch()
    for target in (Target(str(tmp_path)), Target("some.module", is_module=True), Target("bash", no_python=True)):
        assert resolved(target=target).target == target


def test_a_module_needs_python():
    with pytest.raises(LaunchError, match="--module and --no-python"):
        resolved(target=Target("x", is_module=True, no_python=True))
