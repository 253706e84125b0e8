"""Slurm: one launcher on each machine of an allocation, and the batch script that asks for one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from accel_state import STOPPED_EXIT_CODE
from accel_state.errors import LaunchError

if TYPE_CHECKING:
    from accel_launch.config import LaunchConfig


def srun_command(config: LaunchConfig, command: Sequence[str]) -> tuple[str, ...]:
    """`srun` with one launcher for each machine, which does the same again and finds its place.

    Raises:
        LaunchError: nobody says what to repeat: the launch was asked for from Python.
    """
    if not command:
        raise LaunchError("--launcher srun repeats the command line: start it as `accel launch`, not from Python")
    num_machines = str(config.value("num_machines"))
    return (
        *("srun", "--nodes", num_machines, "--ntasks", num_machines, "--ntasks-per-node", "1"),
        *("--kill-on-bad-exit=1", "--wait=60"),
        *(sys.executable, "-m", "accel_launch", *command),
    )


class Batch(NamedTuple):
    """What a batch script asks Slurm for.

    Attributes:
        machines: how many.
        processes: in all.
        gpus_per_machine: 0 for none.
        cpus_per_machine: cores; None leaves it to Slurm.
        time: as Slurm writes it, `2:00:00`; None for the partition's.
        job_name: as the queue shows it.
        partition, account: None for the user's own.
        stop_before_s: seconds before the end of `time` at which the run is told to save and leave; None for never.
        requeue: queue the job again when the run left with `STOPPED_EXIT_CODE`, and when a machine fails.
    """

    machines: int = 1
    processes: int = 1
    gpus_per_machine: int = 0
    cpus_per_machine: int | None = None
    time: str | None = None
    job_name: str = "accel"
    partition: str | None = None
    account: str | None = None
    stop_before_s: int | None = None
    requeue: bool = False


def batch_script(batch: Batch, arguments: Sequence[str]) -> str:
    """The text for `sbatch`: resources, then one `accel launch` per machine.

    Args:
        batch: what to ask for.
        arguments: of `accel launch`, with the script and its own.
    """
    wishes = {
        "job-name": batch.job_name,
        "nodes": batch.machines,
        "ntasks-per-node": 1,
        "gpus-per-node": batch.gpus_per_machine or None,
        "cpus-per-task": batch.cpus_per_machine,
        "time": batch.time,
        "partition": batch.partition,
        "account": batch.account,
        "signal": None if batch.stop_before_s is None else f"USR1@{batch.stop_before_s}",
        "open-mode": "append" if batch.requeue else None,
        "output": "%x-%j.out",
    }
    lines = ["#!/bin/bash", *(f"#SBATCH --{name}={value}" for name, value in wishes.items() if value is not None)]
    lines += ["#SBATCH --requeue"] if batch.requeue else []
    flags = ["--num-processes", str(batch.processes)]
    flags += [] if batch.stop_before_s is None else ["--grace-s", str(batch.stop_before_s)]
    launch = shlex.join([sys.executable, "-m", "accel_launch", "launch", *flags, *arguments])
    # a launcher that leaves first to be resumed must not have the others killed
    lines.append(f"srun --kill-on-bad-exit={int(not batch.requeue)} --wait=60 {launch}")
    if batch.requeue:
        lines += ["code=$?", f'[ $code -ne {STOPPED_EXIT_CODE} ] || scontrol requeue "$SLURM_JOB_ID"', "exit $code"]
    return "\n".join(lines) + "\n"
