"""What is started, as a value and as `--dry-run` prints it."""

import json
import sys
from types import ModuleType

import pytest

from accel_launch import Target, make_plan, resolve_config
from accel_state.errors import LaunchError
from accel_state.topology import Topology

TARGET = Target(__file__, ("--lr", "0.1"))
PEER_DEFAULTS = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_CPU": "false",
    "ACCELERATE_DYNAMO_BACKEND": "no",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "false",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "false",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "false",
}


def planned(flags, environ=None, target=TARGET, num_gpus=0):
    environ = environ or {}
    return make_plan(
        resolve_config(target, flags, environ=environ, count=lambda kind, variables: num_gpus, platform="linux"),
        environ=environ,
    )


def test_ranks_know_their_place():
    plan = planned({"cpu": True, "num_processes": 3})
    for rank in plan.ranks:
        environ = {**rank.environment, "MASTER_PORT": "1234"}
        assert Topology.from_env(environ) == Topology(rank.rank, 3, rank.rank, 3, 0, 1, "127.0.0.1", 1234)


def test_one_process_is_as_if_started_by_hand():
    plan = planned({"cpu": True})
    assert plan.ranks[0].environment == {"ACCEL_USE_CPU": "true", **PEER_DEFAULTS, "ACCELERATE_USE_CPU": "true"}
    assert not Topology.from_env(plan.ranks[0].environment).is_distributed


def test_another_launchers_variables_are_not_inherited():
    around = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
    one = planned({"cpu": True}, around)
    assert set(one.removed) == set(around)
    two = planned({"cpu": True, "num_processes": 2}, around)
    assert two.removed == ("MASTER_PORT",)  # a free one follows at the start
    assert two.ranks[1].environment["RANK"] == "1"
    assert two.address == "127.0.0.1"


def test_as_accelerate_puts_the_alias_in_front_of_the_path(monkeypatch):
    umbrella = ModuleType("accel.compat")
    umbrella.child_environment = lambda environ: {"PYTHONPATH": f"/alias:{environ['PYTHONPATH']}"}
    monkeypatch.setitem(sys.modules, "accel", ModuleType("accel"))
    monkeypatch.setitem(sys.modules, "accel.compat", umbrella)
    around = {"PYTHONPATH": "/mine"}
    assert planned({"as_accelerate": True}, around).ranks[0].environment["PYTHONPATH"] == "/alias:/mine"
    assert "PYTHONPATH" not in planned({}, around).ranks[0].environment


def test_as_accelerate_needs_the_umbrella(monkeypatch):
    monkeypatch.setitem(sys.modules, "accel", ModuleType("accel"))
    monkeypatch.setitem(sys.modules, "accel.compat", None)
    with pytest.raises(LaunchError, match="needs the package accel"):
        planned({"as_accelerate": True})


def test_rendezvous_as_asked():
    plan = planned({"num_processes": 2, "main_process_ip": "127.0.0.2", "main_process_port": 2222})
    assert (plan.address, plan.port) == ("127.0.0.2", 2222)
    assert plan.ranks[0].environment["MASTER_ADDR"] == "127.0.0.2"
    assert plan.ranks[0].environment["MASTER_PORT"] == "2222"
    assert planned({"num_processes": 2, "main_process_port": 0}).port is None
    assert planned({"main_process_port": 2222}).ranks[0].environment["MASTER_PORT"] == "2222"


def test_what_was_said_is_handed_on_and_what_the_peer_always_exports():
    environment = planned({"mixed_precision": "bf16"}, {"ACCELERATE_LOG_LEVEL": "INFO"}).ranks[0].environment
    assert environment == {
        **PEER_DEFAULTS,
        "ACCEL_MIXED_PRECISION": "bf16",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCEL_LOG_LEVEL": "info",
        "ACCELERATE_LOG_LEVEL": "info",
    }


def test_threads():
    assert planned({"num_processes": 2}).ranks[0].environment["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in planned({"num_processes": 2}, {"OMP_NUM_THREADS": "3"}).ranks[0].environment
    assert "OMP_NUM_THREADS" not in planned({"num_processes": 1}).ranks[0].environment
    told = planned({"num_processes": 2, "num_cpu_threads_per_process": 4}, {"OMP_NUM_THREADS": "3"})
    assert told.ranks[1].environment["OMP_NUM_THREADS"] == "4"


def test_gpus_are_hidden_from_the_ranks():
    plan = planned({"gpu_ids": "0, 2"}, num_gpus=2)
    assert [rank.environment["CUDA_VISIBLE_DEVICES"] for rank in plan.ranks] == ["0,2", "0,2"]
    assert "CUDA_VISIBLE_DEVICES" not in planned({"gpu_ids": "all"}, num_gpus=2).ranks[0].environment


def test_commands():
    assert planned({}).ranks[0].command == (sys.executable, "-u", __file__, "--lr", "0.1")
    module = planned({}, target=Target("pkg.mod", ("x",), is_module=True))
    assert module.ranks[0].command == (sys.executable, "-u", "-m", "pkg.mod", "x")
    assert planned({}, target=Target("bash", ("x",), no_python=True)).ranks[0].command == ("bash", "x")


def test_dry_run_text(accel):
    accel.script("")
    done = accel("launch", "--cpu", "--num_processes", "2", "--dry-run", "train.py", "--name", "a b")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[:5] == [
        "2 processes on this machine, meeting at 127.0.0.1:<a free port>",
        "settings",
        "  cpu = True  (flag --cpu)",
        "  num_processes = 2  (flag --num-processes)",
        "environment of all ranks",
    ]
    assert "  ACCELERATE_USE_CPU=true" in lines and "  WORLD_SIZE=2" in lines
    assert lines[-2:] == [
        f"rank {rank}: RANK={rank} LOCAL_RANK={rank} ROLE_RANK={rank} {sys.executable} -u train.py --name 'a b'"
        for rank in range(2)
    ]


def test_dry_run_json(accel):
    accel.script("")
    environ = {"ACCELERATE_MIXED_PRECISION": "bf16", "RANK": "7"}
    plan = json.loads(accel("launch", "--cpu", "--dry-run", "--json", "train.py", env=environ).stdout)
    assert plan["settings"]["mixed_precision"] == {
        "value": "bf16",
        "origin": "environment ACCELERATE_MIXED_PRECISION",
    }
    assert plan["settings"]["num_processes"] == {"value": 1, "origin": "default: --cpu"}
    assert plan["rendezvous"] == {"address": None, "port": None}
    assert plan["removed_variables"] == ["RANK"]
    assert plan["grace_s"] == 10
    assert plan["ranks"] == [
        {
            "rank": 0,
            "command": [sys.executable, "-u", "train.py"],
            "environment": {
                **PEER_DEFAULTS,
                "ACCEL_USE_CPU": "true",
                "ACCELERATE_USE_CPU": "true",
                "ACCEL_MIXED_PRECISION": "bf16",
                "ACCELERATE_MIXED_PRECISION": "bf16",
            },
        }
    ]
