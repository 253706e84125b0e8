"""argparse parsers built from the settings table, with suggestions for mistyped flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from accel_state.errors import SettingError
from accel_state.settings import Setting
from accel_state.settings.table import nearest


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are two lines: what was wrong with the nearest valid word, and where help is.

    Flags have to be written out: an abbreviation that is clear today may not be with the next release.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, but an unknown flag ends it here, where the flags that it may have meant are known."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown argument {unknown[0]}{self.suggestion(unknown[0])}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Print the message and leave with exit code 2."""
        word = _unknown_command(message)
        if word is not None:
            commands = next(action.choices for action in self._actions if isinstance(action.choices, dict))
            message = f"unknown command {word!r}{nearest(word, commands)}"
        print(f"{self.prog}: error: {message}\n{self.prog} --help lists what is allowed", file=sys.stderr)
        raise SystemExit(2)

    def suggestion(self, flag: str) -> str:
        """`; did you mean '--x'?` for the flag that looks most like this one, or nothing."""
        return nearest(flag.partition("=")[0], self._option_string_actions)


def _unknown_command(message: str) -> str | None:
    head = "argument COMMAND: invalid choice: '"
    return message[len(head) :].partition("'")[0] if message.startswith(head) else None


def add_settings(parser: argparse.ArgumentParser, title: str, settings: Iterable[Setting]) -> None:
    """Add a group of flags, in both spellings, for those settings that have flags.

    A flag that is not given leaves None, or False for a switch, so that `resolve` looks further.
    """
    group = parser.add_argument_group(title)
    for row in settings:
        if not row.flags:
            continue
        if row.type is bool:
            group.add_argument(*row.flags, dest=row.key, action="store_true", help=row.doc)
            continue
        kind = "N" if row.type is int else row.key.rpartition("_")[2].upper()
        group.add_argument(
            *row.flags,
            dest=row.key,
            type=_reader(row),
            choices=row.choices or None,
            metavar="{" + ",".join(row.choices) + "}" if row.choices else kind,
            help=row.doc,
        )


def _reader(row: Setting) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return row.parse(text, row.flags[0])
        except SettingError:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give {row.allowed}") from None

    return read
