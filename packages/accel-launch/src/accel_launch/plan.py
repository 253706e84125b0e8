"""Which commands start, with which variables: a value that can be printed before anything happens."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from accel_launch.config import LaunchConfig, Target, chosen_gpus
from accel_state.errors import LaunchError
from accel_state.settings import worker_environment

# What another launcher around us may have left; our ranks must not take it for theirs.
TOPOLOGY_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class RankPlan(NamedTuple):
    """One process: its rank, its command, and the variables that it gets beside the launcher's own."""

    rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]


class LaunchPlan(NamedTuple):
    """All processes of this machine, where they meet, and how long they have to end.

    `port` is None where a free one is chosen at the start; then no rank's environment holds `MASTER_PORT` yet.
    `removed` names variables that the processes do not inherit.
    """

    config: LaunchConfig
    ranks: tuple[RankPlan, ...]
    address: str | None
    port: int | None
    removed: tuple[str, ...]
    grace_s: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {
            "settings": {key: found._asdict() for key, found in self.config.settings.items()},
            "rendezvous": {"address": self.address, "port": self.port},
            "removed_variables": list(self.removed),
            "grace_s": self.grace_s,
            "ranks": [
                {"rank": rank.rank, "command": list(rank.command), "environment": dict(rank.environment)}
                for rank in self.ranks
            ],
        }

    def as_text(self) -> str:
        """For people: settings that are not defaults, then what all ranks share, then each rank."""
        import shlex

        lines = [f"{len(self.ranks)} process{'es' * (len(self.ranks) > 1)} on this machine"]
        if len(self.ranks) > 1:
            lines[0] += f", meeting at {self.address}:{self.port or '<a free port>'}"
        lines.append("settings")
        told = {key: found for key, found in self.config.settings.items() if found.origin != "default"}
        lines += [f"  {key} = {found.value}  ({found.origin})" for key, found in told.items()]
        environments = [rank.environment.items() for rank in self.ranks]
        shared = dict(environments[0] & set.intersection(*map(set, environments)))
        lines.append("environment of all ranks")
        lines += [f"  {name}={shlex.quote(shared[name])}" for name in sorted(shared)]
        for rank in self.ranks:
            own = [f"{name}={shlex.quote(text)}" for name, text in rank.environment.items() if name not in shared]
            lines.append(f"rank {rank.rank}: {' '.join([*own, shlex.join(rank.command)])}")
        return "\n".join(lines)


def make_plan(config: LaunchConfig, *, environ: Mapping[str, str] | None = None) -> LaunchPlan:
    """Turn a resolved launch into commands and variables; touches nothing.

    One process gets no rank variables: it is the same as running the script by hand. Several meet on this machine's
    loopback unless `--main-process-ip` says otherwise.
    """
    environ = os.environ if environ is None else environ
    world_size = config.value("num_processes")
    is_group = world_size > 1
    address = config.value("main_process_ip") or ("127.0.0.1" if is_group else None)
    port = config.value("main_process_port") or None
    shared = _shared_environment(config, environ)
    if address is not None:
        shared["MASTER_ADDR"] = address
    if port is not None:
        shared["MASTER_PORT"] = str(port)
    if is_group:
        shared |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        shared |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    command = _command(config.target)
    ranks = tuple(
        RankPlan(rank, command, ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if is_group else {}) | shared)
        for rank in range(world_size)
    )
    removed = tuple(name for name in TOPOLOGY_VARIABLES if name in environ and name not in ranks[0].environment)
    return LaunchPlan(config, ranks, address, port, removed, config.value("grace_s"))


def _shared_environment(config: LaunchConfig, environ: Mapping[str, str]) -> dict[str, str]:
    told = {key: found.value for key, found in config.settings.items() if found.origin != "default"}
    variables = worker_environment(told)
    threads = config.value("num_cpu_threads_per_process")
    if threads is None and config.value("num_processes") > 1 and "OMP_NUM_THREADS" not in environ:
        threads = 1  # as torchrun: all cores for each process would slow every one of them down
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    gpus = chosen_gpus(config.value("gpu_ids"))
    if gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = gpus
    if config.value("as_accelerate"):
        variables["PYTHONPATH"] = _alias_path(environ)
    return variables


def _alias_path(environ: Mapping[str, str]) -> str:
    """PYTHONPATH with the folder that answers `import accelerate` in front; the umbrella package brings it."""
    import importlib

    try:
        compat = importlib.import_module("accel.compat")
    except ModuleNotFoundError as error:
        raise LaunchError(
            "--as-accelerate needs the package accel, which is not installed: pip install accel"
        ) from error
    path: str = compat.child_environment(environ)["PYTHONPATH"]
    return path


def _command(target: Target) -> tuple[str, ...]:
    if target.no_python:
        return (target.script, *target.arguments)
    # -u: output appears when it is written, also where it goes to a file
    return (sys.executable, "-u", *(("-m",) if target.is_module else ()), target.script, *target.arguments)
