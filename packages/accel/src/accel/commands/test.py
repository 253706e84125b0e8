"""`accel test`: whether training works here, and whether a script trains alike on one process and on many."""

from __future__ import annotations

import argparse
import os
from typing import Any

from accel_launch import CommandParser

DESCRIPTION = """Start the processes that `accel launch` would start with this configuration and let them check, against
what one process computes, collectives, data, precision, checkpoints and training. With --script, run a script of yours
on one process and on all, and compare losses and gradient norms of its first updates; it has to keep the global batch
size, and to leave out dropout or seed it alike."""


def register(subparsers: Any) -> None:
    """Add `test` to the `accel` command."""
    test_command_parser(subparsers)


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accel test`, alone or as a subcommand of `subparsers`."""
    parser = CommandParser.as_command(subparsers, "test", "check that training works here", description=DESCRIPTION)
    parser.add_argument("--config_file", "--config-file", default=None, help="as for `accel launch`")
    parser.add_argument("--cpu", action="store_true", default=None, help="ignore every accelerator")
    parser.add_argument(
        "--num_processes", "--num-processes", type=int, default=None, metavar="N", help="one for each device by default"
    )
    parser.add_argument("--script", default=None, help="compare this script's first updates on 1 and on N processes")
    parser.add_argument(
        "--steps", type=int, default=5, metavar="K", help="updates to compare, with --script; default 5"
    )
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, metavar="X", help="allowed relative difference; default 0.001"
    )
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, metavar="...", help="of the script, after --")
    parser.set_defaults(func=test_command)
    return parser


def test_command(args: argparse.Namespace) -> int:
    """Run the checks; returns the exit code.

    Raises:
        LaunchError, SettingError: the processes cannot be started as asked.
    """
    settings = {"cpu": args.cpu, "num_processes": args.num_processes}
    if args.script is not None:
        from accel.sanity.comparing import compare

        arguments = args.script_arguments[1:] if args.script_arguments[:1] == ["--"] else args.script_arguments
        return compare(args.script, arguments, args.config_file, settings, args.steps, args.tolerance)
    from accel_launch import Target, find_config, make_plan, resolve_config, run_plan

    file = find_config(args.config_file, os.environ)
    target = Target("accel.sanity.checks", is_module=True)
    return run_plan(make_plan(resolve_config(target, settings, file=file)))


def main() -> int:
    """The command on its own, for those who start it by its module."""
    return test_command(test_command_parser().parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
