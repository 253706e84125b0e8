"""From a row of the table to its value: argument, then environment, then default.

This is the one module of accel that reads settings from the environment, and it reads when asked: clients change
variables at run time.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from accel_state.callsite import warn_user
from accel_state.settings.model import UNSET, Resolved, Setting
from accel_state.settings.table import all_settings, find_setting, nearest


def resolve(key: str, argument: Any = UNSET, *, environ: Mapping[str, str] | None = None) -> Resolved:
    """The value of a setting and where it came from.

    Args:
        key: the row's key.
        argument: what the caller was given; `UNSET` and None mean nothing. An argument that equals the default still
            beats the environment.
        environ: the variables; the process's own by default. An empty variable counts as not set.

    Raises:
        SettingError: an unknown key, or a value that is not allowed.
    """
    row = find_setting(key)
    if argument is not UNSET and argument is not None:
        return Resolved(row.parse(argument, "argument"), "argument")
    return _from_environment(row, os.environ if environ is None else environ) or Resolved(row.default, "default")


def setting(key: str, argument: Any = UNSET) -> Any:
    """The value alone: `resolve(key, argument).value`."""
    return resolve(key, argument).value


def _from_environment(row: Setting, environ: Mapping[str, str]) -> Resolved | None:
    found = [name for name in (row.env, *row.fallback_env) if environ.get(name)]
    if not found:
        return None
    used, text = found[0], environ[found[0]]
    beaten = [f"{name}={environ[name]!r}" for name in found[1:] if environ[name] != text]
    origin = f"environment {used}" + (f" (over {', '.join(beaten)})" if beaten else "")
    return Resolved(row.parse(text, f"environment {used}"), origin)


def worker_environment(values: Mapping[str, Any]) -> dict[str, str]:
    """The variables by which a launcher hands settings on, under our names and those that other code reads.

    Args:
        values: key to value; rows that are not for workers, and None, are left out.
    """
    variables = {}
    for key, value in values.items():
        row = find_setting(key)
        if row.for_workers and value is not None:
            text = str(value).lower() if row.type is bool else str(value)
            variables.update(dict.fromkeys((row.env, *row.fallback_env), text))
    return variables


_FOR_TESTS = "ACCEL_TEST_"  # what tests say to the programs that they start


def warn_unknown_variables() -> None:
    """Warn, once per variable, of those that `unknown_variables` finds in this process's environment."""
    for text in unknown_variables():
        _warn_once(text)


@functools.cache
def _warn_once(text: str) -> None:
    warn_user(text)


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """A text for each `ACCEL_*` variable that no setting reads, with the name that was probably meant."""
    environ = os.environ if environ is None else environ
    known = [row.env for row in all_settings()]
    return [
        f"{name} is set but nothing reads it{nearest(name, known)}"
        for name in sorted(environ)
        if name.startswith("ACCEL_") and name not in known and not name.startswith(_FOR_TESTS)
    ]
