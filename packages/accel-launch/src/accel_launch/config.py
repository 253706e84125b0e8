"""What a launch was asked for: resolved once, by a pure function, with the origin of every value."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from accel_state.device_count import count_devices
from accel_state.errors import LaunchError
from accel_state.settings import Resolved, all_settings, find_setting, resolve
from accel_state.settings.table import nearest


class Target(NamedTuple):
    """What each process runs: a script of this Python, a module (`is_module`), or any program (`no_python`)."""

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    no_python: bool = False


class LaunchConfig(NamedTuple):
    """A launch as it was asked for: the target, every setting with its origin, and how many processes that makes."""

    target: Target
    settings: Mapping[str, Resolved]

    def value(self, key: str) -> Any:
        """The value of a setting."""
        return self.settings[key].value


def resolve_config(
    target: Target,
    flags: Mapping[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    count: Callable[[str, Mapping[str, str]], int] = count_devices,
    platform: str | None = None,
) -> LaunchConfig:
    """Settle every setting of a launch by flag, then environment, then default.

    Args:
        target: what to run.
        flags: key to value; None or absent means not given. Other names are left alone.
        environ: the variables; the process's own by default.
        count: how many devices of a kind a process with these variables sees.
        platform: as `sys.platform`, and that by default.

    Raises:
        SettingError: a value that is not allowed.
        LaunchError: settings that contradict each other or this machine.
    """
    environ = os.environ if environ is None else environ
    settings = {}
    for row in all_settings():
        found = resolve(row.key, flags.get(row.key), environ=environ)
        is_flag = found.origin == "argument" and row.flags
        settings[row.key] = found._replace(origin=f"flag {row.flags[0]}") if is_flag else found
    _check_target(target)
    _check_machines(settings)
    _check_gpu_request(settings)
    num_gpus = 0 if settings["cpu"].value else _count_gpus(settings, environ, count)
    settings["num_processes"] = _num_processes(settings, num_gpus, platform or sys.platform)
    return LaunchConfig(target, settings)


def show(settings: Mapping[str, Resolved], key: str) -> str:
    """How messages name a setting and who gave it: `--num-processes 4`, `ACCEL_USE_CPU=true`."""
    value, origin = settings[key]
    if origin.startswith("environment "):
        return f"{origin.split()[1]}={str(value).lower() if value is True else value}"
    return f"{(*find_setting(key).flags, key)[0]}{'' if value is True else f' {value}'}"


def _check_target(target: Target) -> None:
    if target.is_module and target.no_python:
        raise LaunchError("--module and --no-python contradict each other: a module needs Python to run it")
    if target.is_module or target.no_python:
        return  # found by Python, and by the system, when they start
    script = Path(target.script)
    if script.is_file() or (script / "__main__.py").is_file():
        return
    if script.is_dir():
        raise LaunchError(f"{target.script!r} is a directory without a __main__.py: name a script inside it")
    folder = script.parent
    near = [str(other) for other in folder.glob("*.py")] if folder.is_dir() else []
    where = "" if script.is_absolute() else f" in {Path.cwd()}"
    raise LaunchError(f"there is no script {target.script!r}{where}{nearest(target.script, near)}")


def _check_machines(settings: Mapping[str, Resolved]) -> None:
    if settings["num_machines"].value > 1:
        raise LaunchError(
            f"{show(settings, 'num_machines')}: accel launch starts the processes of one machine for now. Start "
            "`torchrun --nnodes N --node-rank R --master-addr HOST --master-port PORT ... SCRIPT` on each machine: "
            "accel reads the variables that it sets"
        )
    if settings["machine_rank"].value > 0:
        raise LaunchError(
            f"{show(settings, 'machine_rank')} contradicts {show(settings, 'num_machines')}: the only machine is 0"
        )


def _check_gpu_request(settings: Mapping[str, Resolved]) -> None:
    for key in ("multi_gpu", "gpu_ids"):
        if settings["cpu"].value and settings[key].value:
            raise LaunchError(f"{show(settings, 'cpu')} and {show(settings, key)} contradict each other: give one")
    if settings["torch_device"].value and settings["gpu_ids"].value:
        raise LaunchError(
            f"{show(settings, 'torch_device')} and {show(settings, 'gpu_ids')} contradict each other: give one"
        )


def _count_gpus(
    settings: Mapping[str, Resolved],
    environ: Mapping[str, str],
    count: Callable[[str, Mapping[str, str]], int],
) -> int:
    ids = chosen_gpus(settings["gpu_ids"].value)
    if ids is None:
        num_gpus = count("cuda", environ)
        hidden = "CUDA_VISIBLE_DEVICES" in environ
        because = f" (CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']!r})" if hidden else ""
        if settings["multi_gpu"].value and num_gpus == 0:
            raise LaunchError(
                f"{show(settings, 'multi_gpu')}: no GPU is visible here{because}; use --cpu for CPU ranks"
            )
        return num_gpus
    num_gpus = count("cuda", {**environ, "CUDA_VISIBLE_DEVICES": ids})
    if num_gpus < len(ids.split(",")):
        raise LaunchError(f"{show(settings, 'gpu_ids')}: only {num_gpus} of them can be used here; see `accel env`")
    return num_gpus


def chosen_gpus(gpu_ids: str | None) -> str | None:
    """The `CUDA_VISIBLE_DEVICES` that `--gpu-ids` asks for; None for all."""
    return None if gpu_ids is None or gpu_ids == "all" else gpu_ids.replace(" ", "")


def _num_processes(settings: Mapping[str, Resolved], num_gpus: int, platform: str) -> Resolved:
    asked = settings["num_processes"]
    if asked.value is None:
        why = "--cpu" if settings["cpu"].value else f"{num_gpus or 'no'} GPU{'s' * (num_gpus != 1)} visible"
        return Resolved(max(1, num_gpus), f"default: {why}")
    if asked.value > 1 and platform in ("darwin", "win32"):
        raise LaunchError(f"{show(settings, 'num_processes')}: on macOS and Windows accel runs one process")
    if 0 < num_gpus < asked.value:
        raise LaunchError(
            f"{show(settings, 'num_processes')}: {num_gpus} GPU{'s are' if num_gpus > 1 else ' is'} visible, and each "
            "process needs its own; ask for fewer, or add --cpu"
        )
    return asked
