"""`accel slurm`: the batch script that runs a launch on machines of Slurm."""

from __future__ import annotations

import argparse
from typing import Any

from accel_launch.parser import CommandParser

DESCRIPTION = """Print a script for sbatch: what to ask Slurm for, and `accel launch` on each machine, where it finds
its place by itself. Flags of `accel launch` and the training script follow after --."""


def register(subparsers: Any) -> None:
    """Add `slurm` to the `accel` command."""
    slurm_command_parser(subparsers)


def slurm_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accel slurm`, alone or as a subcommand of `subparsers`."""
    usage = "accel slurm [flags] -- [flags of accel launch] script [arguments of the script]"
    parser = CommandParser.as_command(
        subparsers, "slurm", "print a script for sbatch", description=DESCRIPTION, usage=usage
    )
    parser.add_argument("--machines", type=_count, default=1, metavar="N", help="how many; 1 by default")
    parser.add_argument("--processes", type=_count, default=1, metavar="N", help="in all; 1 by default")
    parser.add_argument("--gpus-per-machine", type=int, default=0, metavar="N", help="0 by default")
    parser.add_argument("--cpus-per-machine", type=_count, default=None, metavar="N", help="cores; Slurm's by default")
    parser.add_argument("--time", default=None, help="as Slurm writes it, 2:00:00; the partition's by default")
    parser.add_argument("--job-name", default="accel", metavar="NAME", help="as the queue shows it")
    parser.add_argument("--partition", default=None, metavar="NAME", help="of the cluster")
    parser.add_argument("--account", default=None, metavar="NAME", help="that pays")
    parser.add_argument(
        "--stop-before",
        dest="stop_before_s",
        type=_count,
        default=None,
        metavar="SECONDS",
        help="tell the run so long before --time is over to save and leave (accelerator.should_stop)",
    )
    parser.add_argument("--requeue", action="store_true", help="queue the job again when it left to be resumed")
    parser.add_argument("launch", nargs=argparse.REMAINDER, metavar="...", help="for accel launch")
    parser.set_defaults(func=slurm_command)
    return parser


def slurm_command(args: argparse.Namespace) -> None:
    """Print the script.

    Raises:
        LaunchError: nothing to launch, or processes that cannot be spread over the machines.
    """
    from accel_launch.slurm import Batch, batch_script
    from accel_state.errors import LaunchError

    arguments = args.launch[1:] if args.launch[:1] == ["--"] else args.launch
    if not arguments:
        raise LaunchError("what to launch is missing: accel slurm --machines 2 -- train.py")
    if args.processes % args.machines:
        raise LaunchError(f"--processes {args.processes} cannot be spread evenly over --machines {args.machines}")
    if args.stop_before_s is not None and args.time is None:
        raise LaunchError(f"--stop-before {args.stop_before_s} counts back from the end: give --time, as in 2:00:00")
    wishes = {name: getattr(args, name) for name in Batch._fields}
    print(batch_script(Batch(**wishes), arguments), end="")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number
