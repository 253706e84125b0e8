"""Reading, changing and cleaning environment variables, for scripts and tests; torch-free."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})
_OWN_PREFIXES = ("ACCELERATE_", "ACCEL_")
_FORBIDDEN = frozenset(";\n<> ")  # in a line that mpirun reads back

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 for y, yes, t, true, on, 1; 0 for n, no, f, false, off, 0; in any case.

    Args:
        value: the word.
        to_bool: return True or False instead.

    Raises:
        ValueError: another word.
    """
    word = value.strip().lower()
    if word not in _TRUE and word not in _FALSE:
        raise ValueError(f"invalid truth value {value!r}: allowed are {', '.join(sorted(_TRUE | _FALSE))}")
    return word in _TRUE if to_bool else int(word in _TRUE)


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """The first of several variables that is set to an integer of at least 0, or the default.

    Raises:
        ValueError: one that is set to something else than an integer.
    """
    for name in env_keys:
        text = os.environ.get(name, "-1")
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{name}={text!r} is not an integer") from None
        if value >= 0:
            return value
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """A variable as a truth value, or the default where it is not set.

    Raises:
        ValueError: it is set to another word than those of `str_to_bool`.
    """
    text = os.environ.get(key)
    if text is None:
        return default
    try:
        return bool(str_to_bool(text))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """A variable as it is, or the default where it is not set."""
    return os.environ.get(key, default)


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """`NAME=value` lines, as a file for `mpirun` or `source` holds them.

    Args:
        current_env: the variables. One with a space, a semicolon, `<`, `>` or a line break in it, or without a value,
            is left out, and named in a warning of this module's logger.
    """
    lines = []
    for name, value in current_env.items():
        if not (name and value) or _FORBIDDEN & {*name, *value}:
            logging.getLogger(__name__).warning(
                "leaving out %s=%r: it is empty or has characters that a file of variables cannot hold", name, value
            )
            continue
        lines.append(f"{name}={value}\n")
    return lines


# ---------------------------------------------------------------- changing, for a while


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables within the block; afterwards they are as they were.

    Args:
        kwargs: names, which are upper-cased, and values, which become texts.
    """
    changes = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ[name] for name in changes if name in os.environ}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Run the block without any variable; afterwards all are as they were before."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _own_variables_kept() -> Iterator[None]:
    """Afterwards the variables of accel, and those of the peer's names, are as they were before."""
    before = _own_variables()
    try:
        yield
    finally:
        for name in _own_variables():
            del os.environ[name]
        os.environ.update(before)


def _own_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_OWN_PREFIXES)}


def purge_accelerate_environment(func_or_cls: _Decorated) -> _Decorated:
    """Decorator: whatever a function does to variables named ACCELERATE_* or ACCEL_* is undone when it ends.

    Args:
        func_or_cls: a function, also a generator or a coroutine; or a class, of which every `test…` method is
            decorated, inherited ones and those of later subclasses too.
    """
    purged = _purge_class(func_or_cls) if inspect.isclass(func_or_cls) else _purge_function(func_or_cls)
    return cast(_Decorated, purged)


def _purge_function(function: Any) -> Any:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            with _own_variables_kept():
                return await function(*args, **kwargs)

    elif inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _own_variables_kept():
                return (yield from function(*args, **kwargs))

    else:

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _own_variables_kept():
                return function(*args, **kwargs)

    run.__accel_purged__ = True  # type: ignore[attr-defined]
    return run


def _purge_class(cls: Any) -> Any:
    _purge_methods(cls)
    given = cls.__dict__.get("__init_subclass__")

    def __init_subclass__(subclass: Any, /, **kwargs: Any) -> None:  # noqa: N807
        if given is not None:
            given.__func__(subclass, **kwargs)
        else:
            super(cls, subclass).__init_subclass__(**kwargs)
        _purge_methods(subclass)

    cls.__init_subclass__ = classmethod(__init_subclass__)
    return cls


def _purge_methods(cls: Any) -> None:
    for name in dir(cls):
        if not name.startswith("test"):
            continue
        found = inspect.getattr_static(cls, name)
        is_bound = isinstance(found, (staticmethod, classmethod))
        function = found.__func__ if is_bound else found
        if inspect.isfunction(function) and not hasattr(function, "__accel_purged__"):
            purged = _purge_function(function)
            setattr(cls, name, type(found)(purged) if is_bound else purged)
