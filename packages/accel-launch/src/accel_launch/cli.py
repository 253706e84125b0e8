"""The `accel` command: finds its subcommands and runs one.

A subcommand is an entry point of the group `accel.commands`: a function `register(subparsers)`, in a module that
imports no torch, which adds a parser and sets its default `func`, called with the parsed arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from accel_launch.discovery import find_commands, load
from accel_launch.parser import CommandParser
from accel_state.errors import AccelError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `accel` command.

    Args:
        argv: the arguments after the program's name; the process's own by default.

    Returns:
        The exit code: 0, 2 for a request that cannot be met, or the subcommand's own.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = CommandParser(prog="accel", description="Train PyTorch models on any number of devices.")
    parser.add_argument("--version", action="version", version=_version(argv), help="show the version")
    subparsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="accel_command", parser_class=CommandParser
    )
    commands = find_commands()
    if argv and argv[0] in commands:  # the others' modules need not be imported
        commands = {argv[0]: commands[argv[0]]}
    _register(commands, subparsers)
    arguments = parser.parse_args(argv)
    if arguments.accel_command is None:
        parser.print_help()
        return 0
    try:
        return int(arguments.func(arguments) or 0)
    except AccelError as error:
        print(f"accel {arguments.accel_command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _register(commands: Mapping[str, str], subparsers: Any) -> None:
    for name, target in commands.items():
        try:
            load(target)(subparsers)
        except Exception as error:  # noqa: BLE001  a broken package must not take the other commands along
            print(f"accel: {name!r} cannot be loaded from {target}: {type(error).__name__}: {error}", file=sys.stderr)


def _version(argv: Sequence[str]) -> str:
    """The version, read only when it is asked for."""
    if "--version" not in argv[:1]:
        return ""
    from importlib.metadata import version

    return f"accel {version('accel-launch')}"
