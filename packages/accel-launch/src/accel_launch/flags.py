"""The flags of `accel launch` that the settings table does not tell: the peer's defaults, words and extra flags.

Other libraries build on the peer's parser: they read its namespace, with its defaults. So a flag that was not given
leaves the peer's default there; `given` in the namespace names those that were.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

from accel_state.errors import LaunchError, SettingError
from accel_state.settings import Setting
from accel_state.settings.model import FALSE_WORDS, TRUE_WORDS

DEFAULTS: Final[Mapping[str, Any]] = {
    "dynamo_mode": "default",
    "tee": "0",
    "role": "default",
    "rdzv_backend": "static",
    "rdzv_conf": "",
    "max_restarts": 0,
    "monitor_interval": 0.1,
    "fsdp_version": "1",
    "fsdp_offload_params": "false",
    "fsdp_min_num_params": 100000000,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_reshard_after_forward": "true",
    "fsdp_forward_prefetch": "false",
    "fsdp_use_orig_params": "true",
    "fsdp_cpu_ram_efficient_loading": "true",
    "fsdp_sync_module_states": "true",
    "fsdp_activation_checkpointing": "false",
    "fsdp_activation_checkpointing_offload": "false",
    "megatron_lm_tp_degree": 1,
    "megatron_lm_pp_degree": 1,
    "megatron_lm_gradient_clipping": 1.0,
    "megatron_lm_use_custom_fsdp": False,
    "megatron_lm_no_load_optim": False,
    "megatron_lm_no_save_optim": False,
    "megatron_lm_eod_mask_loss": False,
    "megatron_lm_optimizer_cpu_offload": False,
    "megatron_lm_overlap_cpu_optimizer_d2h_h2d": False,
    "megatron_lm_use_precision_aware_optimizer": False,
    "fp8_margin": 0,
    "fp8_interval": 1,
    "fp8_format": "HYBRID",
    "fp8_amax_history_len": 1024,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_opt_level": "O2",
    "fp8_enable_fsdp_float8_all_gather": "true",
    "fp8_pad_inner_dim": "true",
    "parallelism_config_dp_replicate_size": 1,
    "parallelism_config_dp_shard_size": 1,
    "parallelism_config_tp_size": 1,
    "parallelism_config_cp_size": 1,
    "parallelism_config_cp_backend": "torch",
    "parallelism_config_cp_comm_strategy": "allgather",
    "parallelism_config_sp_size": 1,
    "parallelism_config_sp_backend": "deepspeed",
    "parallelism_config_sp_seq_length_is_variable": True,
    "parallelism_config_sp_attn_implementation": "sdpa",
}
"""Key to what the peer's parser leaves where the flag was not given; None, or False for a switch, for all others."""

SHORT: Final = {"quiet": "-q", "tee": "-t"}

_UNSET_SWITCHES: Final = ("quiet", "debug")  # None where not given, in the peer

_SWITCHES: Final = (
    *("cpu", "multi_gpu", "tpu", "cpu_affinity", "use_fsdp", "use_deepspeed", "use_megatron_lm", "debug", "quiet"),
    *("use_parallelism_config", "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation"),
    *("same_network", "tpu_use_cluster", "tpu_use_sudo", "downcast_bf16", "fp8_use_autocast_during_eval"),
    *("as_accelerate", "enable_rich", "log_prefix"),
)

_UNSUPPORTED: Final = {
    "vm": "its engine does not exist yet",
    "env": "its engine does not exist yet; set the variable in front of the command: NAME=value accel launch ...",
    "aws_access_key_id": "jobs on Amazon SageMaker cannot be started: run `accel launch` inside the job",
    "aws_secret_access_key": "jobs on Amazon SageMaker cannot be started: run `accel launch` inside the job",
}
"""Flags that are known, and refused where they are used."""


def is_switch(row: Setting) -> bool:
    """Whether the flag takes no value. The peer's plugins have flags for yes and no that take one."""
    return row.type is bool and row.key in _SWITCHES


def default(row: Setting) -> Any:
    """What the namespace holds where the flag was not given."""
    if row.key in DEFAULTS:
        return DEFAULTS[row.key]
    return False if is_switch(row) and row.key not in _UNSET_SWITCHES else None


def add_extra_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that are no settings: a file, three-fold words, and what is refused."""
    group = parser.add_argument_group("more")
    group.add_argument(
        "--config-file", "--config_file", metavar="PATH", help="a YAML file; that of `accel config` by default"
    )
    group.add_argument(
        "--fp8-override-linear-precision",
        "--fp8_override_linear_precision",
        type=_linear_precisions,
        default=(False, False, False),
        metavar="F,D,W",
        help="compute forward, gradients of inputs, and of weights in more bits: true,false,false",
    )
    group.add_argument(
        "--no-tpu-cluster", "--no_tpu_cluster", dest="tpu_use_cluster", action="store_false", help="no pod of TPUs"
    )
    for name in ("vm", "env"):
        group.add_argument(
            f"--{name}", action="append", metavar="TEXT", help="for TPUs, whose engine does not exist yet"
        )
    for name in ("aws-access-key-id", "aws-secret-access-key"):
        group.add_argument(f"--{name}", f"--{name.replace('-', '_')}", metavar="KEY", help="refused: no SageMaker jobs")


def given_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Name to value of the flags that were given, or changed in the namespace after it was parsed.

    Raises:
        LaunchError: a flag that is known and cannot be honoured.
    """
    from accel_state.settings import all_settings

    marked: frozenset[str] = getattr(args, "given", frozenset())
    defaults = {row.key: default(row) for row in all_settings() if row.flags}
    found = {
        key: value
        for key, value in vars(args).items()
        if key in defaults and value is not None and (key in marked or value != defaults[key])
    }
    for key, reason in _UNSUPPORTED.items():
        if getattr(args, key, None):
            raise LaunchError(f"--{key.replace('_', '-')}: {reason}")
    precisions = getattr(args, "fp8_override_linear_precision", (False, False, False))
    if tuple(precisions) != (False, False, False):
        found |= read_linear_precisions(precisions)
    return found


def read_linear_precisions(value: Any) -> dict[str, bool]:
    """The three settings that one word has in the peer: for forward, gradients of inputs, and of weights.

    Raises:
        SettingError: not three times yes or no.
    """
    parts = value.strip("()[] ").split(",") if isinstance(value, str) else list(value)
    words = [str(part).strip().lower() for part in parts]
    if len(words) != 3 or not all(word in (*TRUE_WORDS, *FALSE_WORDS) for word in words):
        raise SettingError(f"fp8_override_linear_precision: {value!r} is not allowed; give true,false,false or alike")
    keys = ("fp8_override_fprop", "fp8_override_dgrad", "fp8_override_wgrad")
    return {key: word in TRUE_WORDS for key, word in zip(keys, words, strict=True)}


def _linear_precisions(text: str) -> tuple[bool, ...]:
    try:
        return tuple(read_linear_precisions(text).values())
    except SettingError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
