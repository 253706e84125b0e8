"""From constructor arguments, the environment and defaults to the values an `Accelerator` is built from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import accel_ckpt
import accel_data
import accel_parallel
import accel_state
from accel_state import warn_user
from accel_state.errors import SettingError
from accel_state.settings import UNSET, resolve

if TYPE_CHECKING:
    from accel_ckpt import ProjectConfiguration
    from accel_data import DataLoaderConfiguration
    from accel_parallel import GradientAccumulationPlugin, TorchDynamoPlugin


def check_type(argument: str, value: Any, kind: type) -> None:
    """Refuse a configuration object of another type, which would fail somewhere later.

    Raises:
        SettingError: names the argument, the value and the type that is wanted.
    """
    if not isinstance(value, kind):
        raise SettingError(f"{argument}={value!r} is a {type(value).__name__}: give a {kind.__name__}")


def check_flags(**flags: Any) -> None:
    """Refuse what is neither True nor False: a text such as "no" would count as True.

    Raises:
        SettingError: names the argument and its value.
    """
    for argument, value in flags.items():
        if not isinstance(value, bool):
            raise SettingError(f"{argument}={value!r} is a {type(value).__name__}: give True or False")


def generator_kinds(rng_types: Sequence[Any] | None) -> list[Any]:
    """The generators that loaders set to rank 0's at the start of an iteration.

    Raises:
        SettingError: a word that names no generator, or a single one that is not in a list.
    """
    if rng_types is None:
        return ["generator"]
    known = [kind.value for kind in accel_state.RNGType]
    is_list = isinstance(rng_types, Sequence) and not isinstance(rng_types, str)
    if not is_list or not all(str(getattr(kind, "value", kind)) in known for kind in rng_types):
        raise SettingError(f"rng_types={rng_types!r} is not allowed: give a list of {', '.join(known)}")
    return list(rng_types)


def accumulation_plugin(steps: Any, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """The accumulation settings: the plugin's, or as many steps as the argument or the environment says.

    Raises:
        SettingError: the plugin and the argument name different numbers of steps, or the number is not allowed.
    """
    if plugin is not None:
        check_type("gradient_accumulation_plugin", plugin, accel_parallel.GradientAccumulationPlugin)
    if plugin is None:
        return accel_parallel.GradientAccumulationPlugin(num_steps=resolve("gradient_accumulation_steps", steps).value)
    if steps is not UNSET and steps != plugin.num_steps:
        raise SettingError(
            f"gradient_accumulation_steps={steps!r} contradicts gradient_accumulation_plugin with num_steps="
            f"{plugin.num_steps!r}: give one of them"
        )
    return plugin


def dynamo_plugin(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """How models are compiled: by the plugin, or by the backend of the argument or the environment.

    Raises:
        SettingError: both are given, or a backend that does not exist.
    """
    if plugin is None:
        return accel_parallel.TorchDynamoPlugin(backend=backend)
    check_type("dynamo_plugin", plugin, accel_parallel.TorchDynamoPlugin)
    if backend is not None:
        raise SettingError(
            f"dynamo_backend={backend!r} beside dynamo_plugin with backend={plugin.backend.value!r}: give the plugin "
            "alone, with that backend"
        )
    if not plugin.compiles and plugin.to_kwargs():
        warn_user(f"dynamo_plugin says {plugin.to_kwargs()} and compiles nothing: its backend is NO. Give it one")
    return plugin


def loader_configuration(split_batches: Any, config: DataLoaderConfiguration | None) -> DataLoaderConfiguration:
    """The loaders' settings, with the deprecated `split_batches` argument as its field.

    Raises:
        SettingError: the argument contradicts the configuration.
    """
    if config is not None:
        check_type("dataloader_config", config, accel_data.DataLoaderConfiguration)
    if split_batches is UNSET:
        return config or accel_data.DataLoaderConfiguration()
    warn_user(
        "Accelerator(split_batches=...) is deprecated: pass "
        "dataloader_config=DataLoaderConfiguration(split_batches=...)",
        FutureWarning,
    )
    if config is None:
        return accel_data.DataLoaderConfiguration(split_batches=split_batches)
    if config.split_batches != split_batches:
        raise SettingError(
            f"split_batches={split_batches!r} contradicts dataloader_config.split_batches={config.split_batches!r}: "
            "set it in dataloader_config alone"
        )
    return config


def project_configuration(
    project_dir: str | os.PathLike[str] | None, config: ProjectConfiguration | None
) -> ProjectConfiguration:
    """Where the run writes: the configuration, with the directory of the argument when it names none itself.

    Raises:
        SettingError: both name a directory and they differ.
    """
    if config is not None:
        check_type("project_config", config, accel_ckpt.ProjectConfiguration)
    config = config or accel_ckpt.ProjectConfiguration()
    if project_dir is None:
        return config
    if not isinstance(project_dir, str | os.PathLike):
        raise SettingError(f"project_dir={project_dir!r} is a {type(project_dir).__name__}: give a path")
    if config.project_dir is None:
        config.set_directories(os.fspath(project_dir))
    elif os.fspath(config.project_dir) != os.fspath(project_dir):
        raise SettingError(
            f"project_dir={os.fspath(project_dir)!r} contradicts project_config.project_dir="
            f"{os.fspath(config.project_dir)!r}: give one of them"
        )
    return config
