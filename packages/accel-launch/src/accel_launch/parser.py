"""argparse parsers built from the settings table, with suggestions for mistyped flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from accel_launch import flags
from accel_state.errors import SettingError
from accel_state.settings import Setting
from accel_state.settings.table import nearest

_NOT_GIVEN = object()


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are two lines: what was wrong with the nearest valid word, and where help is.

    Flags have to be written out: an abbreviation that is clear today may not be with the next release.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    @classmethod
    def as_command(cls, subparsers: Any, name: str, summary: str, **options: Any) -> argparse.ArgumentParser:
        """The parser of `accel NAME`: one of `subparsers`, or on its own where there are none.

        Args:
            summary: its line in the list of commands.
            options: of `argparse.ArgumentParser`.
        """
        if subparsers is None:
            return cls(prog=f"accel {name}", **options)
        parser: argparse.ArgumentParser = subparsers.add_parser(name, help=summary, **options)
        return parser

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, but an unknown flag ends it here, where the flags that it may have meant are known.

        The namespace's `given` names the arguments that were given, whatever their values.
        """
        namespace = argparse.Namespace() if namespace is None else namespace
        defaults: dict[str, Any] = {}
        for action in self._actions:
            if action.default is not argparse.SUPPRESS:
                defaults.setdefault(action.dest, action.default)
        for name, value in defaults.items():
            if value is not None:
                setattr(namespace, name, _NOT_GIVEN)
        parsed, unknown = super().parse_known_args(args, namespace)
        given = {name for name, value in defaults.items() if getattr(parsed, name, None) not in (_NOT_GIVEN, None)}
        for name, value in defaults.items():
            if getattr(parsed, name, None) is _NOT_GIVEN:
                setattr(parsed, name, value)
        parsed.given = frozenset(given) | getattr(parsed, "given", frozenset())
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
    """Add a group of flags, in both spellings, for those settings that have flags."""
    group = parser.add_argument_group(title)
    for row in settings:
        if not row.flags:
            continue
        words = (*row.flags, *([flags.SHORT[row.key]] if row.key in flags.SHORT else []))
        options: dict[str, Any] = {"dest": row.key, "default": flags.default(row), "help": row.doc}
        if flags.is_switch(row):
            group.add_argument(*words, action="store_true", **options)
            continue
        kinds = {int: "N", float: "X", bool: "{true,false}"}
        metavar = kinds.get(row.type, row.key.rpartition("_")[2].upper())
        if row.choices:
            options["choices"] = row.choices
            metavar = "{" + ",".join(row.choices) + "}"
        group.add_argument(*words, type=_reader(row), metavar=metavar, **options)


def _reader(row: Setting) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return row.parse(text, row.flags[0])
        except SettingError:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give {row.allowed}") from None

    return read


def both_spellings(names: Sequence[str]) -> list[str]:
    """Option names, each with `_` and with `-`; positional names and short options as they are."""
    spelled: dict[str, None] = {}
    for name in names:
        spelled[name] = None
        if name.startswith("--"):
            stem = name.removeprefix("--")
            spelled |= {f"--{stem.replace('_', '-')}": None, f"--{stem.replace('-', '_')}": None}
    return list(spelled)


class CustomArgumentGroup(argparse._ArgumentGroup):  # noqa: SLF001  argparse names no public class for it
    """A group of `CustomArgumentParser`."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """As argparse's, for both spellings of a long option."""
        return super().add_argument(*both_spellings(names), **options)


class CustomArgumentParser(argparse.ArgumentParser):
    """An argument parser for programs that extend a launcher: long options may be written with `_` or `-`."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """As argparse's, for both spellings of a long option."""
        return super().add_argument(*both_spellings(names), **options)

    def add_argument_group(self, *args: Any, **options: Any) -> CustomArgumentGroup:
        """A group whose options have both spellings too."""
        group = CustomArgumentGroup(self, *args, **options)
        self._action_groups.append(group)
        return group
