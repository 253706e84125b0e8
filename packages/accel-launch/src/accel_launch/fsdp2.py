"""A configuration for FSDP1 turned into one for FSDP2 (`fully_shard`) that trains the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from accel_launch.files import ConfigFile
from accel_state.errors import LaunchError
from accel_state.settings import find_setting

_STRATEGIES: Final = (
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "HYBRID_SHARD_ZERO2",
)  # numbered from 1

_DROPPED: Final = {
    "fsdp_backward_prefetch": "FSDP2 always gathers ahead in backward",
    "fsdp_forward_prefetch": "FSDP2 gathers ahead in forward by itself",
    "fsdp_sync_module_states": "every rank gets rank 0's weights where fsdp_cpu_ram_efficient_loading asks for it",
    "fsdp_use_orig_params": "FSDP2 always keeps the parameters as they were",
}


def convert_to_fsdp2(file: ConfigFile) -> tuple[dict[str, Any], list[str]]:
    """The settings of the file as FSDP2 knows them, and what had to change, in words.

    Raises:
        LaunchError: the file is not for FSDP1, or asks for what FSDP2 does not have.
        SettingError: a value that is not allowed.
    """
    values = {key: find_setting(key).parse(value, file.places.get(key, key)) for key, value in file.values.items()}
    if not values.get("use_fsdp"):
        raise LaunchError(f"{file.path} is not for FSDP: it needs `distributed_type: FSDP`")
    if values.get("fsdp_version") == 2:
        raise LaunchError(f"{file.path} is for FSDP2 already (fsdp_version: 2)")
    notes = [f"{key} is left out: {why}" for key, why in _DROPPED.items() if values.pop(key, None) is not None]
    strategy = _strategy(values, file)
    values["fsdp_version"] = 2
    values["fsdp_reshard_after_forward"] = str(strategy in ("FULL_SHARD", "HYBRID_SHARD")).lower()
    if strategy.startswith("HYBRID"):
        values |= _replicas(values, strategy, file)
        notes.append(f"{strategy}: each machine holds a replica, by parallelism_config")
    if str(values.get("fsdp_state_dict_type", "")).upper() in ("LOCAL_STATE_DICT", "2"):
        values["fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
        notes.append("fsdp_state_dict_type: LOCAL_STATE_DICT becomes SHARDED_STATE_DICT, which FSDP2 has instead")
    return values, notes


def _strategy(values: dict[str, Any], file: ConfigFile) -> str:
    given = values.pop("fsdp_sharding_strategy", None) or values.pop("fsdp_reshard_after_forward", None) or "FULL_SHARD"
    words = {str(number): word for number, word in enumerate(_STRATEGIES, 1)}
    words |= {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}
    strategy = words.get(str(given).upper(), str(given).upper())
    if strategy not in _STRATEGIES:
        raise LaunchError(f"{file.path}: fsdp_sharding_strategy: {given!r} is not allowed: {', '.join(_STRATEGIES)}")
    if strategy == "NO_SHARD":
        raise LaunchError(
            f"{file.path}: fsdp_sharding_strategy: NO_SHARD shards nothing, which FSDP2 cannot do: write "
            "`distributed_type: MULTI_GPU` for DDP"
        )
    return strategy


def _replicas(values: Mapping[str, Any], strategy: str, file: ConfigFile) -> dict[str, Any]:
    num_machines, num_processes = values.get("num_machines", 1), values.get("num_processes")
    if num_processes is None or num_processes % num_machines:
        raise LaunchError(
            f"{file.path}: fsdp_sharding_strategy: {strategy} shards within a machine: give num_processes, a multiple "
            f"of num_machines ({num_machines})"
        )
    return {
        "use_parallelism_config": True,
        "parallelism_config_dp_replicate_size": num_machines,
        "parallelism_config_dp_shard_size": num_processes // num_machines,
    }
