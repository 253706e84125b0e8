"""What a launch was asked for: resolved once, by a pure function, with the origin of every value."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from accel_launch import checks, machines
from accel_launch.files import NO_FILE, ConfigFile
from accel_state.device_count import count_devices
from accel_state.settings import Resolved, Setting, all_settings, resolve


class Target(NamedTuple):
    """What each process runs: a script of this Python, a module (`is_module`), or any program (`no_python`)."""

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    no_python: bool = False


class LaunchConfig(NamedTuple):
    """A launch as it was asked for: the target, and every setting with its origin."""

    target: Target
    settings: Mapping[str, Resolved]

    def value(self, key: str) -> Any:
        """The value of a setting."""
        return self.settings[key].value


def resolve_config(
    target: Target,
    flags: Mapping[str, Any],
    *,
    file: ConfigFile = NO_FILE,
    environ: Mapping[str, str] | None = None,
    count: Callable[[str, Mapping[str, str]], int] = count_devices,
    platform: str | None = None,
) -> LaunchConfig:
    """Settle every setting of a launch by flag, then configuration file, then environment, then default.

    Args:
        target: what to run.
        flags: key to value; None or absent means not given. Other names are left alone.
        file: what a configuration file says, see `files.find_config`.
        environ: the variables; the process's own by default.
        count: how many devices of a kind a process with these variables sees.
        platform: as `sys.platform`, and that by default.

    Raises:
        SettingError: a value that is not allowed.
        LaunchError: settings that contradict each other or this machine.
    """
    environ = os.environ if environ is None else environ
    platform = platform or sys.platform
    settings = {row.key: _resolve(row, flags.get(row.key), file, environ) for row in all_settings()}
    checks.check_target(target)
    checks.drop_what_a_flag_overrules(settings)
    checks.check_what_cannot_be_honoured(settings, file)
    checks.check_devices(settings)
    machines.settle_launcher(settings, environ)
    machines.settle_machines(settings, environ)
    is_elsewhere = settings["launcher"].value == "ray"  # on machines that Ray knows
    num_gpus = 0 if settings["cpu"].value or is_elsewhere else checks.count_gpus(settings, environ, count)
    settings["num_processes"] = machines.num_processes(settings, num_gpus, platform)
    machines.check_launcher(settings, platform)
    return LaunchConfig(target, settings)


def _resolve(row: Setting, flag: Any, file: ConfigFile, environ: Mapping[str, str]) -> Resolved:
    if flag is None and row.key in file.values:
        place = f"file {file.path}: {file.places.get(row.key, row.yaml)}"
        return Resolved(row.parse(file.values[row.key], place), place)
    found = resolve(row.key, flag, environ=environ)
    is_flag = found.origin == "argument" and row.flags
    return found._replace(origin=f"flag {row.flags[0]}") if is_flag else found
