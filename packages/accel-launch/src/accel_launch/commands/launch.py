"""`accel launch`: run a script in several processes."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from accel_launch import flags
from accel_launch.config import Target, resolve_config
from accel_launch.files import find_config
from accel_launch.parser import CommandParser, add_settings
from accel_launch.plan import make_plan
from accel_state.errors import LaunchError
from accel_state.settings.table import SECTIONS

DESCRIPTION = """Run a script in one process per device, or in as many processes as you say.
Flags are written with hyphens or underscores. A value comes from its flag, else from the configuration file (see
`accel config`), else from ACCEL_<NAME> or ACCELERATE_<NAME> in the environment, else from its default; --dry-run shows
what was found where."""


def register(subparsers: Any) -> None:
    """Add `launch` to the `accel` command."""
    launch_command_parser(subparsers)


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accel launch`, alone or as a subcommand of `subparsers`."""
    usage = "accel launch [flags] script [arguments of the script]"
    options = {"description": DESCRIPTION, "formatter_class": argparse.RawDescriptionHelpFormatter, "usage": usage}
    parser = CommandParser.as_command(subparsers, "launch", "run a script in several processes", **options)
    parser.add_argument("-m", "--module", action="store_true", default=None, help="the script is a module's name")
    parser.add_argument(
        "--no-python", "--no_python", action="store_true", default=None, help="run the script without Python in front"
    )
    parser.add_argument(
        "--dry-run", "--dry_run", action="store_true", help="print what would be started, with which variables"
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: as JSON")
    for title, settings in SECTIONS:
        add_settings(parser, title, settings)
    flags.add_extra_flags(parser)
    parser.add_argument("training_script", metavar="script", help="path of the script")
    arguments = parser.add_argument(
        "training_script_args", metavar="arguments", nargs=argparse.REMAINDER, help="handed to the script as they are"
    )
    arguments.required = False  # argparse would name them, too, where the script is missing
    parser.set_defaults(func=launch_command)
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Do what the parsed arguments say.

    Raises:
        SystemExit: the processes did not all end well; with the exit code of the one that failed first.
        LaunchError, SettingError: the request cannot be met.
    """
    target = Target(args.training_script, tuple(args.training_script_args), bool(args.module), bool(args.no_python))
    given = flags.given_flags(args)
    file = find_config(getattr(args, "config_file", None), os.environ)
    command = ["launch", *sys.argv[sys.argv.index("launch") + 1 :]] if "launch" in sys.argv[:2] else ()
    plan = make_plan(resolve_config(target, given, file=file), command=command)
    if args.json and not args.dry_run:
        raise LaunchError("--json prints what --dry-run would: give both")
    if args.dry_run:
        print(_json(plan.as_dict()) if args.json else plan.as_text())
        return
    from accel_launch.run import run_plan

    code = run_plan(plan)
    if code:
        raise SystemExit(code)


def _json(value: Any) -> str:
    import json

    return json.dumps(value, indent=2)


def main() -> None:
    """The command on its own, for those who start it by its module."""
    launch_command(launch_command_parser().parse_args())


if __name__ == "__main__":
    main()
