"""Requests that contradict each other or this machine, refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accel_launch.files import ConfigFile
from accel_state.errors import LaunchError
from accel_state.settings import Resolved, find_setting
from accel_state.settings.table import nearest

if TYPE_CHECKING:
    from accel_launch.config import Target

Settings = dict[str, Resolved]

_ENGINES = ("use_fsdp", "use_deepspeed", "use_megatron_lm", "tpu")
_NOT_ON_CPU = ("multi_gpu", "gpu_ids")


def show(settings: Mapping[str, Resolved], key: str) -> str:
    """How messages name a setting and who gave it: `--num-processes 4`, `ACCEL_USE_CPU=true`."""
    value, origin = settings[key]
    if origin.startswith("environment "):
        return f"{origin.split()[1]}={str(value).lower() if value is True else value}"
    if origin.startswith("file "):
        path, _, place = origin.removeprefix("file ").partition(": ")
        return f"{place if ': ' in place else f'{place}: {value}'} in {path}"
    return f"{(*find_setting(key).flags, key)[0]}{'' if value is True else f' {value}'}"


def check_target(target: Target) -> None:
    """The script has to be there.

    Raises:
        LaunchError: it is not, or how to run it contradicts itself.
    """
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


def drop_what_a_flag_overrules(settings: Settings) -> None:
    """A flag for one kind of run beats a file that describes another: the file's wish is dropped, and says so."""
    groups = [(("cpu",), _NOT_ON_CPU), (_NOT_ON_CPU, ("cpu",))]
    groups += [((engine,), tuple(other for other in _ENGINES if other != engine)) for engine in _ENGINES]
    for winners, losers in groups:
        by_flag = [key for key in winners if settings[key].value and settings[key].origin.startswith("flag ")]
        for key in losers:
            if by_flag and settings[key].value and settings[key].origin.startswith("file "):
                default = find_setting(key).default
                settings[key] = Resolved(default, f"default: {show(settings, by_flag[0])} overrules the file")


def check_what_cannot_be_honoured(settings: Settings, file: ConfigFile) -> None:
    """TPUs and SageMaker are known and have no engine here.

    Raises:
        LaunchError: one of them is asked for, or two engines at once.
    """
    if file.sagemaker:
        raise LaunchError(
            f"{file.path}: compute_environment: AMAZON_SAGEMAKER: such jobs cannot be started from here. Run `accel "
            "launch` in the job's own entry point"
        )
    for key in ("tpu", "tpu_use_cluster"):
        if settings[key].value:
            raise LaunchError(f"{show(settings, key)}: the engine for TPUs does not exist yet; leave it out")
    asked = [show(settings, key) for key in _ENGINES if settings[key].value]
    if len(asked) > 1:
        raise LaunchError(f"{' and '.join(asked)} contradict each other: give one")


def check_devices(settings: Settings) -> None:
    """Devices that contradict each other.

    Raises:
        LaunchError: names both.
    """
    for key in _NOT_ON_CPU:
        if settings["cpu"].value and settings[key].value not in (None, False, "all"):
            raise LaunchError(f"{show(settings, 'cpu')} and {show(settings, key)} contradict each other: give one")
    if settings["torch_device"].value and settings["gpu_ids"].value not in (None, "all"):
        raise LaunchError(
            f"{show(settings, 'torch_device')} and {show(settings, 'gpu_ids')} contradict each other: give one"
        )


def count_gpus(
    settings: Settings,
    environ: Mapping[str, str],
    count: Callable[[str, Mapping[str, str]], int],
) -> int:
    """How many GPUs the processes of this machine can have.

    Raises:
        LaunchError: GPUs that were asked for are not there.
    """
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
