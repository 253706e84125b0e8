"""`accel to-fsdp2`: a configuration file for FSDP1 as one for FSDP2."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from accel_launch.files import find_config
from accel_launch.parser import CommandParser
from accel_state.errors import LaunchError

DESCRIPTION = "Turn a configuration file for FSDP1 into one for FSDP2 (fully_shard) that trains the same way."


def register(subparsers: Any) -> None:
    """Add `to-fsdp2` to the `accel` command."""
    to_fsdp2_command_parser(subparsers)


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accel to-fsdp2`, alone or as a subcommand of `subparsers`."""
    parser = CommandParser.as_command(
        subparsers, "to-fsdp2", "turn an FSDP1 configuration into FSDP2", description=DESCRIPTION
    )
    parser.add_argument("--config_file", "--config-file", default=None, help="to read; the default one by default")
    parser.add_argument("--overwrite", action="store_true", help="write to the file that was read")
    parser.add_argument("--output_file", "--output-file", default=None, help="to write")
    parser.set_defaults(func=to_fsdp2_command)
    return parser


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Read, convert, write; what changed goes to stderr.

    Raises:
        LaunchError: nothing to read, nowhere to write, or a configuration that has no counterpart.
    """
    from accel_launch.fsdp2 import convert_to_fsdp2
    from accel_launch.writing import config_text, write_atomically

    if args.overwrite == (args.output_file is not None):
        raise LaunchError("where to write: give either --output-file FILE or --overwrite")
    file = find_config(args.config_file, os.environ)
    if not file.path:
        raise LaunchError("there is no configuration file: give --config-file")
    target = Path(file.path if args.overwrite else args.output_file)
    if not args.overwrite and target.exists():
        raise LaunchError(
            f"{target} is there already: give another --output-file, or --overwrite to change what is read"
        )
    values, notes = convert_to_fsdp2(file)
    for note in notes:
        print(note, file=sys.stderr)
    write_atomically(target, config_text(values, file.others))
    print(f"written: {target}")


def main() -> None:
    """The command on its own, for those who start it by its module."""
    to_fsdp2_command(to_fsdp2_command_parser().parse_args())


if __name__ == "__main__":
    main()
