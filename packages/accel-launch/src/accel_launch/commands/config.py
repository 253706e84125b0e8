"""`accel config`: write, update and explain the file that `accel launch` reads."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from accel_launch.config import LaunchConfig, Target, resolve_config
from accel_launch.files import ConfigFile, default_config_path, find_config, read_config
from accel_launch.parser import CommandParser
from accel_state.device_count import count_devices
from accel_state.errors import LaunchError

DESCRIPTION = """Ask how to train on this machine and write the answers to a file that `accel launch` reads.
Without a terminal: --default, or `accel launch` with flags."""
PATH = "the file; accel/config.yaml in the user's configuration folder by default"
_ANY_SCRIPT = Target("train", is_module=True)  # nobody looks for it: plans are only shown


def register(subparsers: Any) -> None:
    """Add `config` to the `accel` command."""
    get_config_parser(subparsers)


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accel config`, alone or as a subcommand of `subparsers`."""
    options = {"description": DESCRIPTION, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = CommandParser.as_command(subparsers, "config", "write or explain the configuration file", **options)
    _add_path(parser)
    parser.add_argument("--default", action="store_true", help="ask nothing: what this machine has, one machine")
    parser.set_defaults(func=config_command)
    inner = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", parser_class=CommandParser)
    default = inner.add_parser("default", help="ask nothing: what this machine has", description="As --default.")
    default.add_argument("--mixed-precision", "--mixed_precision", choices=("no", "fp16", "bf16"), default="no")
    default.set_defaults(func=default_command)
    update = inner.add_parser("update", help="write the file anew, with keys as this version has them")
    update.set_defaults(func=update_command)
    explain = inner.add_parser("explain", help="show each value and where it came from")
    explain.add_argument("--all", action="store_true", help="defaults too")
    explain.add_argument("--json", action="store_true", help="as JSON")
    explain.set_defaults(func=explain_command)
    for subparser in (default, update, explain):
        _add_path(subparser)
    return parser


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config-file", "--config_file", metavar="PATH", default=None, help=PATH)


def config_command(args: argparse.Namespace) -> None:
    """Ask, show what that would start, and write the answers.

    Raises:
        LaunchError: there is no terminal to ask on, or the file cannot be written.
        SystemExit: the user broke off; with exit code 130.
    """
    if args.default:
        default_command(args)
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise LaunchError(
            "accel config asks questions, and this is no terminal: use `accel config --default`, or flags of `accel "
            "launch`"
        )
    from accel_launch.prompting import TerminalPrompter

    interview(args.config_file, TerminalPrompter())


def interview(config_file: str | None, prompter: Any) -> None:
    """The questions, the preview, and the file.

    Raises:
        SystemExit: the user broke off; with exit code 130.
    """
    from accel_launch.plan import make_plan
    from accel_launch.questionnaire import ask
    from accel_launch.writing import config_text

    path = _path(config_file)
    before = read_config(path).values if path.is_file() else {}
    answers = ask(prompter, {"cuda": count_devices("cuda")}, before)
    if answers is None:
        raise SystemExit(130)
    text = config_text(answers)
    found = ConfigFile(str(path), answers, {}, {})
    print(f"\naccel launch -m train would then start:\n{make_plan(_resolved(found)).as_text()}\n")
    if not prompter.confirm(f"Write this to {path}?", True):
        raise SystemExit(130)
    _write(path, text)


def default_command(args: argparse.Namespace) -> None:
    """Write what this machine has, without questions; an existing file stays.

    Raises:
        LaunchError: there is a file already.
    """
    path = _path(args.config_file)
    if path.exists():
        raise LaunchError(
            f"{path} is there already: remove it, give another --config-file, or use `accel config update`"
        )
    write_basic_config(getattr(args, "mixed_precision", "no"), str(path))


def write_basic_config(mixed_precision: str = "no", save_location: str = "") -> Path | bool:
    """Write a file for what this machine has: its GPUs, else one process on the CPU.

    Args:
        mixed_precision: "no", "fp16" or "bf16".
        save_location: the file's path; that of `accel config` by default.

    Returns:
        The path; False where a file is there already, which stays.

    Raises:
        SettingError: a precision that does not exist.
        LaunchError: the file cannot be written.
    """
    from accel_launch.writing import config_text
    from accel_state.settings import find_setting

    path = _path(save_location or None)
    if path.exists():
        print(f"{path} is there already and stays", file=sys.stderr)
        return False
    precision = find_setting("mixed_precision").parse(mixed_precision, "argument")
    num_gpus = count_devices("cuda")
    values = {"cpu": num_gpus == 0, "mixed_precision": precision, "num_processes": max(1, num_gpus), "num_machines": 1}
    _write(path, config_text(values | ({"multi_gpu": True} if num_gpus > 1 else {})))
    return path


def update_command(args: argparse.Namespace) -> None:
    """Write a file anew, with each key where this version has it.

    Raises:
        LaunchError: there is no file, or it cannot be read.
    """
    from accel_launch.writing import updated_text

    file = find_config(args.config_file, os.environ)
    if not file.path:
        raise LaunchError(f"there is no file to update: neither {default_config_path(os.environ)} nor the peer's")
    _write(Path(file.path), updated_text(file))


def explain_command(args: argparse.Namespace) -> None:
    """Print each value and where it came from."""
    file = find_config(args.config_file, os.environ)
    settings = _resolved(file).settings
    shown = {key: found for key, found in settings.items() if args.all or found.origin != "default"}
    if args.json:
        import json

        print(json.dumps({key: found._asdict() for key, found in shown.items()}, indent=2))
        return
    print(f"configuration file: {file.path or 'none'}")
    for key, found in shown.items():
        print(f"  {key} = {found.value}  ({found.origin})")


def _resolved(file: ConfigFile) -> LaunchConfig:
    return resolve_config(_ANY_SCRIPT, {}, file=file)


def _path(config_file: str | None) -> Path:
    return Path(config_file).expanduser() if config_file else default_config_path(os.environ)


def _write(path: Path, text: str) -> None:
    from accel_launch.writing import write_atomically

    write_atomically(path, text)
    print(f"written: {path}")


def main() -> None:
    """The command on its own, for those who start it by its module."""
    arguments = get_config_parser().parse_args()
    arguments.func(arguments)


if __name__ == "__main__":
    main()
