"""What `Accelerator` cannot honour, or is asked for by a wrong name: refused with the reason, never ignored."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ParamSpec

import accel_ckpt
import accel_data
import accel_parallel
from accel_state.errors import SettingError
from accel_state.settings import resolve

_NO_ENGINE = "its engine does not exist yet. Way out: leave it out; DDP and bf16 are there"

ARGUMENTS: dict[str, str] = {
    "deepspeed_plugin": _NO_ENGINE,
    "deepspeed_plugins": _NO_ENGINE,
    "megatron_lm_plugin": _NO_ENGINE,
}
"""Constructor argument to the reason why it cannot be honoured and what to do instead."""

SETTINGS: dict[str, str] = {
    "use_deepspeed": "deepspeed_plugin",
    "use_megatron_lm": "megatron_lm_plugin",
}
"""Setting by which a launcher asks for the same to the constructor argument."""

MEMBERS: dict[str, str] = {
    "deepspeed_plugin": "accel-parallel",
    "deepspeed_ulysses_dl_adapter": "accel-parallel",
    "lomo_backward": "accel-parallel",
}
"""Members that the peer's Accelerator has and this one does not have yet, and the package that will bring each."""


MISNAMED: dict[str, str] = {"check_breakpoint": "check_trigger"}
"""Members that the peer's reference names by mistake, and the ones that are meant."""

_Arguments = ParamSpec("_Arguments")


def with_hints(init: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """The constructor, with an error for keywords it does not have that names the right word.

    Raises:
        TypeError: from the constructor, as Python's own.
    """
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        for word in kwargs:
            if word not in known:
                raise TypeError(f"Accelerator() has no argument {word!r}: {_right_word(word, known)}")
        init(*args, **kwargs)

    return checked


def _right_word(word: str, known: list[str]) -> str:
    """What to write instead: as a field of a configuration object, or by a name that is nearly the same."""
    import difflib

    for argument, kind in (
        ("dataloader_config", accel_data.DataLoaderConfiguration),
        ("project_config", accel_ckpt.ProjectConfiguration),
        ("gradient_accumulation_plugin", accel_parallel.GradientAccumulationPlugin),
    ):
        if word in {field.name for field in fields(kind)}:
            return f"it is a field of {kind.__name__}: give {argument}={kind.__name__}({word}=...)"
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"


def refuse_what_cannot_be_honoured(arguments: Mapping[str, Any]) -> None:
    """Raises for each of `ARGUMENTS` that was given, by the caller or by the launcher's variables.

    Args:
        arguments: the constructor's values; None asks for nothing.

    Raises:
        SettingError: names what was asked for, who asked, why it cannot be had, and the way out.
    """
    for name, reason in ARGUMENTS.items():
        value = arguments.get(name)
        if value is not None:
            raise SettingError(f"Accelerator({name}={value!r}) cannot be honoured: {reason}.")
    for key, name in SETTINGS.items():
        value, origin = resolve(key)
        if value:
            raise SettingError(f"{key}={value!r} ({origin}) cannot be honoured: {ARGUMENTS[name]}.")
