"""`accel tpu-config`: run commands on all hosts of a TPU pod, by Google's command line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from accel_launch.files import find_config
from accel_launch.parser import CommandParser
from accel_state.errors import LaunchError

DESCRIPTION = "Run commands on all hosts of a TPU pod, through gcloud; --debug only prints what would be run."


def register(subparsers: Any) -> None:
    """Add `tpu-config` to the `accel` command."""
    tpu_command_parser(subparsers)


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accel tpu-config`, alone or as a subcommand of `subparsers`."""
    parser = CommandParser.as_command(subparsers, "tpu-config", "run commands on a TPU pod", description=DESCRIPTION)

    def add(name: str, text: str, **options: Any) -> None:
        parser.add_argument(*dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")), help=text, **options)

    add("config_file", "where tpu_name, tpu_zone, commands and command_file may stand", metavar="PATH", default=None)
    add("tpu_name", "of the pod", metavar="NAME", default=None)
    add("tpu_zone", "where it is", metavar="ZONE", default=None)
    add("use_alpha", "use `gcloud alpha`", action="store_true")
    add("command_file", "a file with a command on each line", metavar="PATH", default=None)
    add("command", "a command; can be given several times", action="append", nargs="+", default=None)
    add("install_accelerate", "install accelerate there first", action="store_true")
    add("accelerate_version", "which one; `latest` or a number", metavar="VERSION", default="latest")
    add("debug", "print the command instead of running it", action="store_true")
    parser.set_defaults(func=tpu_command_launcher)
    return parser


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run the commands on the pod, or print how.

    Raises:
        LaunchError: the pod's name or zone, or the commands, are missing, or gcloud is.
        SystemExit: gcloud failed; with its exit code.
    """
    command = tpu_command(args)
    if args.debug:
        print("Running", " ".join(command))
        return
    import subprocess

    try:
        done = subprocess.run(command, check=False)
    except OSError as error:
        raise LaunchError(f"gcloud cannot be started: {error.strerror}; install Google's command line") from None
    if done.returncode:
        raise SystemExit(done.returncode)


def tpu_command(args: argparse.Namespace) -> list[str]:
    """What is run.

    Raises:
        LaunchError: the pod's name or zone, or the commands, are missing.
    """
    told = find_config(args.config_file, os.environ).others
    where: dict[str, str] = {}
    for name in ("tpu_name", "tpu_zone"):
        where[name] = str(getattr(args, name) or told.get(name, ""))
        if not where[name]:
            raise LaunchError(
                f"--{name.replace('_', '-')} is missing, and the configuration file does not say it either"
            )
    commands = [word if isinstance(word, str) else " ".join(word) for word in args.command or ()]
    path = args.command_file or (None if commands else told.get("command_file"))
    if path:
        try:
            commands = [*commands, *Path(path).read_text(encoding="utf-8").splitlines()]
        except OSError as error:
            raise LaunchError(f"--command-file {path} cannot be read: {error.strerror}") from None
    commands = commands or list(told.get("commands") or ())
    if args.install_accelerate:
        commands = [f"pip install {_requirement(args.accelerate_version)}", *commands]
    if not commands:
        raise LaunchError("commands are missing: give --command or --command-file")
    shell = "; ".join(["cd /usr/share", *commands])
    alpha = ["alpha"] if args.use_alpha else []
    options = ["--zone", where["tpu_zone"], "--command", shell, "--worker", "all"]
    return ["gcloud", *alpha, "compute", "tpus", "tpu-vm", "ssh", where["tpu_name"], *options]


def _requirement(version: str) -> str:
    if version == "latest":
        return "-U accelerate"
    return f"accelerate=={version}"
