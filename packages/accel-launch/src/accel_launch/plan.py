"""Which commands start, with which variables: a value that can be printed before anything happens."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from accel_launch import deepspeed
from accel_launch.config import LaunchConfig, Target
from accel_launch.elastic.plan import agent_command
from accel_launch.environment import shared_environment
from accel_launch.mpi import find_mpi, mpi_command
from accel_launch.ray import plan as ray_plan
from accel_launch.slurm import srun_command

# What another launcher around us may have left; our ranks must not take it for theirs.
TOPOLOGY_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


STARTERS = {"srun": "srun", "mpi": "mpirun", "deepspeed": "DeepSpeed's launcher"}
"""Launchers that are one command, which starts the ranks by itself."""


class RankPlan(NamedTuple):
    """One process: its rank, its command, and the variables that it gets beside the launcher's own."""

    rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]


class LaunchPlan(NamedTuple):
    """All processes of this machine, where they meet, and how long they have to end.

    `port` is None where a free one is chosen at the start; then no rank's environment holds `MASTER_PORT` yet.
    `removed` names variables that the processes do not inherit. `agent` is the process that starts the ranks, where
    torch elastic or Ray does; their numbers are then those that they will have when all machines come in order, and
    Ray tells them the rest of their place. `env_file` is what DeepSpeed's launcher reads beside its own environment.
    `sigterm_as` is the signal by which SIGTERM is handed on: Open MPI hands SIGUSR1 on to its ranks, which both stop a
    run, and ends them at once on SIGTERM.
    """

    config: LaunchConfig
    ranks: tuple[RankPlan, ...]
    address: str | None
    port: int | None
    removed: tuple[str, ...]
    grace_s: int
    agent: RankPlan | None = None
    env_file: deepspeed.EnvFile | None = None
    sigterm_as: str = "SIGTERM"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {
            "settings": {key: found._asdict() for key, found in self.config.settings.items()},
            "rendezvous": {"address": self.address, "port": self.port},
            "removed_variables": list(self.removed),
            "grace_s": self.grace_s,
            "sigterm_as": self.sigterm_as,
            "agent": list(self.agent.command) if self.agent else None,
            "env_file": self.env_file.as_dict() if self.env_file else None,
            "ranks": [
                {"rank": rank.rank, "command": list(rank.command), "environment": dict(rank.environment)}
                for rank in self.ranks
            ],
        }

    def as_text(self) -> str:
        """For people: settings that are not defaults, then what all ranks share, then each rank."""
        import shlex

        lines = [self._headline(), "settings"]
        told = {key: found for key, found in self.config.settings.items() if found.origin != "default"}
        lines += [f"  {key} = {found.value}  ({found.origin})" for key, found in told.items()]
        environments = [rank.environment.items() for rank in self.ranks]
        shared = dict(environments[0] & set.intersection(*map(set, environments)))
        lines.append("environment of all ranks")
        lines += [f"  {name}={shlex.quote(shared[name])}" for name in sorted(shared)]
        for rank in self.ranks:
            own = [f"{name}={shlex.quote(text)}" for name, text in rank.environment.items() if name not in shared]
            who = f"rank {rank.rank}" if self.config.value("launcher") not in STARTERS else "command"
            lines.append(f"{who}: {' '.join([*own, shlex.join(rank.command)])}")
        if self.env_file is not None:
            lines.append(self.env_file.as_text())
        return "\n".join(lines)

    def _headline(self) -> str:
        config = self.config
        launcher, num_machines = config.value("launcher"), config.value("num_machines")
        if launcher in STARTERS:
            return f"{config.value('num_processes')} processes, started by {STARTERS[launcher]}"
        text = f"{len(self.ranks)} process{'es' * (len(self.ranks) > 1)}"
        if launcher == "ray":
            return f"{text}, started by Ray: {ray_plan.describe(config)}"
        text += " on this machine"
        if num_machines > 1:
            text += f", which is {config.value('machine_rank')} of {num_machines}"
        if config.value("num_processes") > 1:
            text += f", meeting at {self.address}:{self.port or '<a free port>'}"
        if launcher == "elastic":
            text += f"; torch elastic starts them, again at most {config.value('max_restarts')} times"
        return text


class Ending(NamedTuple):
    """How a launch ended: its exit code, and what is known about a failure."""

    code: int
    words: str


def make_plan(
    config: LaunchConfig,
    *,
    environ: Mapping[str, str] | None = None,
    command: Sequence[str] = (),
    mpi: Callable[[], str] = find_mpi,
) -> LaunchPlan:
    """Turn a resolved launch into commands and variables; touches nothing.

    One process gets no rank variables: it is the same as running the script by hand. Several meet on this machine's
    loopback unless `--main-process-ip` says otherwise.

    Args:
        config: the launch.
        environ: the variables; the process's own by default.
        command: the arguments of `accel` that asked for this, which `srun` repeats on each machine.
        mpi: says which `mpirun` is here; called where one is used.

    Raises:
        LaunchError: a launcher that is needed is not installed.
    """
    environ = os.environ if environ is None else environ
    shared = shared_environment(config, environ)
    launcher = config.value("launcher")
    if launcher == "srun":
        return _whole(config, (RankPlan(0, srun_command(config, command), {}),))
    if launcher == "mpi":
        kind = mpi()
        argv, variables = mpi_command(config, script_command(config.target), shared, kind)
        sigterm_as = "SIGUSR1" if kind == "openmpi" else "SIGTERM"
        return _whole(config, (RankPlan(0, argv, variables),))._replace(sigterm_as=sigterm_as)
    if launcher == "deepspeed":
        argv = deepspeed.deepspeed_command(config, config.target)
        around = {name: text for name, text in environ.items() if name not in TOPOLOGY_VARIABLES}
        plan = _whole(config, (RankPlan(0, argv, shared),))
        return plan._replace(
            removed=tuple(name for name in TOPOLOGY_VARIABLES if name in environ),
            env_file=deepspeed.env_file(shared, around),
        )
    if launcher == "ray":
        return _ray_plan(config, environ, shared)
    return _local_plan(config, environ, shared)


def _whole(config: LaunchConfig, ranks: tuple[RankPlan, ...]) -> LaunchPlan:
    return LaunchPlan(config, ranks, None, None, (), config.value("grace_s"))


def _ray_plan(config: LaunchConfig, environ: Mapping[str, str], shared: dict[str, str]) -> LaunchPlan:
    argv, world_size = script_command(config.target), config.value("num_processes")
    told = [{"RANK": str(rank), "ROLE_RANK": str(rank), "WORLD_SIZE": str(world_size)} for rank in range(world_size)]
    ranks = tuple(RankPlan(rank, argv, (one if world_size > 1 else {}) | shared) for rank, one in enumerate(told))
    removed = tuple(name for name in TOPOLOGY_VARIABLES if name in environ)
    agent = RankPlan(0, ray_plan.agent_command(config, argv, shared), {})
    port = config.value("main_process_port") or None
    return LaunchPlan(config, ranks, None, port, removed, config.value("grace_s"), agent)


def _local_plan(config: LaunchConfig, environ: Mapping[str, str], shared: dict[str, str]) -> LaunchPlan:
    world_size, num_machines = config.value("num_processes"), config.value("num_machines")
    here, machine = world_size // num_machines, config.value("machine_rank")
    is_group = world_size > 1
    address = config.value("main_process_ip") or ("127.0.0.1" if is_group else None)
    port = config.value("main_process_port") or None
    if address is not None:
        shared["MASTER_ADDR"] = address
    if port is not None:
        shared["MASTER_PORT"] = str(port)
    if is_group:
        shared |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(here)}
        shared |= {"GROUP_RANK": str(machine), "GROUP_WORLD_SIZE": str(num_machines)}
    argv = script_command(config.target)
    ranks = tuple(
        RankPlan(here * machine + i, argv, (_place(here * machine + i, i) if is_group else {}) | shared)
        for i in range(here)
    )
    if config.value("launcher") == "elastic":
        removed = tuple(name for name in TOPOLOGY_VARIABLES if name in environ)
        own = {name: text for name, text in shared.items() if name not in TOPOLOGY_VARIABLES}
        agent = RankPlan(0, agent_command(config, argv), own)
        return LaunchPlan(config, ranks, address, port, removed, config.value("grace_s"), agent)
    removed = tuple(name for name in TOPOLOGY_VARIABLES if name in environ and name not in ranks[0].environment)
    return LaunchPlan(config, ranks, address, port, removed, config.value("grace_s"))


def _place(rank: int, local_rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "ROLE_RANK": str(rank)}


def script_command(target: Target) -> tuple[str, ...]:
    """What each process runs."""
    if target.no_python:
        return (target.script, *target.arguments)
    # -u: output appears when it is written, also where it goes to a file
    return (sys.executable, "-u", *(("-m",) if target.is_module else ()), target.script, *target.arguments)
