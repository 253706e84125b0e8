"""What `Accelerator` knows by name but cannot honour yet: refused with the reason, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
