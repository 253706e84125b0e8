"""What a setting is, and how a value of it is read."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from accel_state.errors import SettingError

TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")


class Unset:
    """The type of `UNSET`: an argument that was not given, told apart from every value that could be."""

    def __repr__(self) -> str:
        return "<unset>"

    def __bool__(self) -> bool:
        return False


UNSET: Final = Unset()


class Resolved(NamedTuple):
    """A value and where it came from: `argument`, `environment ACCEL_X`, `default`, ..."""

    value: Any
    origin: str


class Setting(NamedTuple):
    """One row of the table; made by `define`, which derives the names from the key."""

    key: str
    type: type[bool] | type[int] | type[float] | type[str]
    default: Any
    doc: str
    env: str
    fallback_env: tuple[str, ...]
    flags: tuple[str, ...]
    yaml: str
    choices: tuple[str, ...]
    minimum: int | None
    maximum: int | None
    for_workers: bool

    @property
    def allowed(self) -> str:
        """The values that are allowed, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.type is bool:
            return f"one of {', '.join(TRUE_WORDS)} or {', '.join(FALSE_WORDS)}"
        if self.type is str:
            return "a text"
        if self.type is float:
            return "a number"
        if self.minimum is not None and self.maximum is not None:
            return f"an integer from {self.minimum} to {self.maximum}"
        return "an integer" if self.minimum is None else f"an integer of at least {self.minimum}"

    def parse(self, value: Any, source: str) -> Any:
        """A value of this setting's type from a text or a Python value.

        Args:
            value: what was given; words and choices are read without regard to case.
            source: who gave it, for the message: a variable's name, a flag, `argument`.

        Raises:
            SettingError: not an allowed value; names source, value and what is allowed.
        """
        parsed: Any = _PARSERS[self.type](value)
        if self.choices and parsed is not None:
            parsed = next((choice for choice in self.choices if choice == parsed.lower()), None)
        too_small = self.minimum is not None and parsed is not None and parsed < self.minimum
        too_large = self.maximum is not None and parsed is not None and parsed > self.maximum
        if parsed is None or too_small or too_large:
            name = self.key if source == "argument" else f"{self.key} from {source}"
            raise SettingError(f"{name}: {value!r} is not allowed; give {self.allowed}")
        return parsed


def define(
    key: str,
    type_: type[bool] | type[int] | type[float] | type[str],
    default: Any,
    doc: str,
    *,
    env: str | None = None,
    fallback_env: tuple[str, ...] | None = None,
    flags: tuple[str, ...] | None = None,
    yaml: str | None = None,
    choices: tuple[str, ...] = (),
    minimum: int | None = None,
    maximum: int | None = None,
    for_workers: bool = True,
) -> Setting:
    """A row of the table.

    Args:
        key: its name in Python; the names below follow from it unless given.
        type_: bool, int, float or str: plain types, since it travels through the environment.
        default: the value when nobody says anything; None where that is worked out later (`doc` says how).
        doc: one sentence for `--help` and the documentation.
        env: the variable, `ACCEL_<KEY>`.
        fallback_env: read when `env` is not set: `ACCELERATE_<...>` with the same ending.
        flags: of `accel launch`, both spellings; empty for none.
        yaml: its place in a configuration file, the key.
        choices: allowed words, in lower case.
        minimum, maximum: bounds of a number, both allowed.
        for_workers: whether the launcher hands it to the processes that it starts.
    """
    env = env or f"ACCEL_{key.upper()}"
    if fallback_env is None:
        fallback_env = (f"ACCELERATE_{env.removeprefix('ACCEL_')}",)
    if flags is None:
        flags = tuple(dict.fromkeys((f"--{key.replace('_', '-')}", f"--{key}")))
    return Setting(
        key, type_, default, doc, env, fallback_env, flags, yaml or key, choices, minimum, maximum, for_workers
    )


def handed_on(
    section: str,
    prefix: str,
    key: str,
    type_: type[bool] | type[int] | type[float] | type[str],
    doc: str,
    *,
    env: str | None = None,
    flags: tuple[str, ...] | None = None,
) -> Setting:
    """A row by which a launcher tells a plugin one of its fields; None, as long as nobody says anything, leaves it.

    Args:
        section: of a configuration file.
        prefix: of the peer's variable, `ACCELERATE_` or nothing.
        key: its name in Python, on the command line and in the section.
        type_: of the value.
        doc: one sentence.
        env: the variable without prefix, where it is not named as the key.
        flags: of `accel launch`, both spellings; empty for none.
    """
    name = env or key.upper()
    fallback = (f"{prefix}{name}",)
    place = f"{section}.{key}"
    return define(key, type_, None, doc, env=f"ACCEL_{name}", fallback_env=fallback, flags=flags, yaml=place)


# ---------------------------------------------------------------- each returns None for "not a value of this type"


def _parse_bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in TRUE_WORDS:
        return True
    return False if word in FALSE_WORDS else None


def _parse_int(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        return int(value, 10) if isinstance(value, str) else None
    except ValueError:
        return None


def _parse_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _parse_str(value: Any) -> str | None:
    value = getattr(value, "value", value)  # an enum member stands for its value
    return value if isinstance(value, str) else None


_PARSERS: Final = {bool: _parse_bool, int: _parse_int, float: _parse_float, str: _parse_str}
