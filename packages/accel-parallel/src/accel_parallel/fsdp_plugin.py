"""Options of FSDP, versions 1 and 2, with the peer's names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accel_state import DistributedType
from accel_state.errors import SettingError
from accel_state.settings import setting

from . import sharding_units

FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_BACKWARD_PREFETCH = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
FSDP2_STATE_DICT_TYPE = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
"""The names that the fields of `FullyShardedDataParallelPlugin` take, and those of version 2 where it has others."""

_DTYPES = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp8": torch.bfloat16,  # matrices compute in fp8, the rest in bf16
}


@dataclass
class FullyShardedDataParallelPlugin:
    """What FSDP is told. Fields that are None take their ACCEL_FSDP_* variable (or the peer's FSDP_*), else a default.

    Args:
        fsdp_version: 1, or 2 for `fully_shard`; default 1.
        sharding_strategy: version 1: a `ShardingStrategy`, its name or number; default FULL_SHARD.
        reshard_after_forward: version 2: free gathered parameters after forward; default True. Version 1 takes a
            sharding strategy here as well.
        backward_prefetch: version 1: a `BackwardPrefetch` or its name.
        mixed_precision_policy: torch's policy of the version, a dict of its arguments, or "fp16", "bf16", "fp32".
        auto_wrap_policy: a name of `FSDP_AUTO_WRAP_POLICY`, or a function; see `sharding_units.as_policy`.
        cpu_offload: keep parameters, gradients and optimizer state on the CPU; or torch's policy of the version.
        ignored_modules: modules that are not sharded, or a regular expression for their names.
        state_dict_type: a `StateDictType` or its name; default SHARDED_STATE_DICT, in version 1 FULL_STATE_DICT.
        state_dict_config, optim_state_dict_config: version 1: torch's; they follow from the type.
        limit_all_gathers, use_orig_params, param_init_fn, sync_module_states, forward_prefetch: version 1: torch's.
            `param_init_fn` gives values to modules on the meta device, in version 2 as well.
        activation_checkpointing: compute the activations of the sharded units anew in backward.
        cpu_ram_efficient_loading: only rank 0 has the weights; the other ranks' models may lie on the meta device.
        transformer_cls_names_to_wrap: classes for TRANSFORMER_BASED_WRAP, as a list or with commas between. None takes
            the model's repeated blocks.
        min_num_params: for SIZE_BASED_WRAP.
        activation_checkpointing_offload: keep what is checkpointed on the CPU until backward.

    Raises:
        SettingError: a value that is not allowed, or that this version has no use for.
    """

    kind: ClassVar[str] = "fsdp"
    distributed_type: ClassVar[DistributedType] = DistributedType.FSDP

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: int | None = None
    activation_checkpointing_offload: bool | None = None

    def __post_init__(self) -> None:
        if self.fsdp_version is None:
            self.fsdp_version = setting("fsdp_version") or 1
        if self.fsdp_version not in (1, 2):
            raise SettingError(f"fsdp_version={self.fsdp_version!r} does not exist: use 1, or 2 for fully_shard")
        self._fill("activation_checkpointing", False)
        self._fill("activation_checkpointing_offload", False)
        self._fill("cpu_ram_efficient_loading", False)
        self._fill("cpu_offload", setting("fsdp_offload_params") or False)
        self._fill("state_dict_type", "SHARDED_STATE_DICT" if self.fsdp_version == 2 else "FULL_STATE_DICT")
        if self.fsdp_version == 1:
            self._resolve_version_1()
        else:
            self._resolve_version_2()
        self._resolve_wrapping()
        self.set_cpu_offload()
        self.set_state_dict_type()
        if isinstance(self.mixed_precision_policy, str):
            self.set_mixed_precision(self.mixed_precision_policy, override=True)
        elif isinstance(self.mixed_precision_policy, dict):
            self.mixed_precision_policy = self._policy_class()(**self.mixed_precision_policy)
        if self.mixed_precision_policy is not None:
            self.validate_mixed_precision_policy()

    def _fill(self, name: str, default: Any) -> None:
        if getattr(self, name) is None:
            said = setting(f"fsdp_{name}") if name != "cpu_offload" else None
            setattr(self, name, default if said is None else said)

    def _resolve_version_1(self) -> None:
        if isinstance(self.reshard_after_forward, bool):
            raise SettingError(
                f"reshard_after_forward={self.reshard_after_forward!r} is for fsdp_version=2; version 1 takes "
                f"sharding_strategy, one of {', '.join(FSDP_SHARDING_STRATEGY)}"
            )
        strategy = self.sharding_strategy or self.reshard_after_forward or setting("fsdp_sharding_strategy")
        self.sharding_strategy = _member("sharding_strategy", strategy or "FULL_SHARD", ShardingStrategy)
        self._fill("backward_prefetch", None)
        if isinstance(self.backward_prefetch, str) and self.backward_prefetch.upper() == "NO_PREFETCH":
            self.backward_prefetch = None
        elif self.backward_prefetch is not None:
            self.backward_prefetch = _member("backward_prefetch", self.backward_prefetch, BackwardPrefetch)
        for name in ("use_orig_params", "sync_module_states", "forward_prefetch"):
            self._fill(name, False)
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            warnings.warn(
                "sync_module_states=False contradicts cpu_ram_efficient_loading=True, where only rank 0 has the "
                "weights: it is taken as True.",
                stacklevel=4,
            )
            self.sync_module_states = True

    def _resolve_version_2(self) -> None:
        if self.sharding_strategy is not None:
            raise SettingError(
                f"sharding_strategy={self.sharding_strategy!r} is for fsdp_version=1: give reshard_after_forward=True "
                "for FULL_SHARD, False for SHARD_GRAD_OP, and ParallelismConfig(dp_replicate_size=..., "
                "dp_shard_size=...) for the hybrid ones"
            )
        self.reshard_after_forward = _reshard_after_forward(self.reshard_after_forward)
        if self.forward_prefetch:
            raise SettingError(
                "forward_prefetch=True is for fsdp_version=1: fully_shard prefetches by itself; leave it"
            )
        without_effect = [
            name for name in ("use_orig_params", "sync_module_states", "backward_prefetch") if getattr(self, name)
        ]
        if without_effect:
            warnings.warn(
                f"{', '.join(without_effect)} of FSDP version 1 has no effect in version 2, which keeps the original "
                "parameters, prefetches by itself, and takes rank 0's weights with cpu_ram_efficient_loading.",
                stacklevel=4,
            )
        self.use_orig_params = self.sync_module_states = self.backward_prefetch = self.forward_prefetch = None

    def _resolve_wrapping(self) -> None:
        if self.auto_wrap_policy is None:
            self.auto_wrap_policy = setting("fsdp_auto_wrap_policy")
        if self.transformer_cls_names_to_wrap is None:
            self.transformer_cls_names_to_wrap = setting("fsdp_transformer_layer_cls_to_wrap")
        if isinstance(self.transformer_cls_names_to_wrap, str):
            names = self.transformer_cls_names_to_wrap.split(",")
            self.transformer_cls_names_to_wrap = [name.strip() for name in names if name.strip()]
        if self.min_num_params is None:
            self.min_num_params = setting("fsdp_min_num_params") or 0
        if isinstance(self.auto_wrap_policy, str):
            word = self.auto_wrap_policy.upper()
            policies: dict[str, Any] = {
                "TRANSFORMER_BASED_WRAP": transformer_auto_wrap_policy,
                "SIZE_BASED_WRAP": size_based_auto_wrap_policy,
                "NO_WRAP": None,
            }
            if word not in policies:
                raise SettingError(
                    f"auto_wrap_policy={self.auto_wrap_policy!r} does not exist: use one of "
                    f"{', '.join(FSDP_AUTO_WRAP_POLICY)}, or a function"
                )
            self.auto_wrap_policy = policies[word]

    # ---- the peer's methods

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Fix the policy for this model: class names become classes, sizes numbers.

        Raises:
            PlanError: the model has no module of a class that was named.
        """
        self.auto_wrap_policy = self.policy_for(model)

    def policy_for(self, model: nn.Module) -> sharding_units.WrapPolicy | None:
        """The policy for one model; None shards it as a single unit."""
        policy = self.auto_wrap_policy
        if policy is transformer_auto_wrap_policy:
            names = self.transformer_cls_names_to_wrap
            return sharding_units.by_class_names(model, names) if names else sharding_units.by_blocks(model)
        if policy is size_based_auto_wrap_policy:
            return sharding_units.by_size(self.min_num_params) if self.min_num_params else None
        return None if policy is None else sharding_units.as_policy(policy)

    def ignored_in(self, model: nn.Module) -> list[nn.Module]:
        """The modules of one model that are left whole.

        Raises:
            SettingError: a regular expression that fits no module.
        """
        if self.ignored_modules is None:
            return []
        if not isinstance(self.ignored_modules, str):
            return list(self.ignored_modules)
        pattern = re.compile(self.ignored_modules)
        found = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
        if not found:
            raise SettingError(f"ignored_modules={self.ignored_modules!r} fits no module: see model.named_modules()")
        return found

    def set_mixed_precision(self, mixed_precision: str, buffer_autocast: bool = False, override: bool = False) -> None:
        """Compute and reduce in one precision, unless a policy is there already.

        Args:
            mixed_precision: "fp16", "bf16" or "fp32".
            buffer_autocast: version 1: leave buffers in fp32.
            override: replace a policy that is there.
        """
        if self.mixed_precision_policy is not None and not override:
            return
        if mixed_precision not in _DTYPES:
            raise SettingError(f"mixed precision {mixed_precision!r} does not exist: use one of {', '.join(_DTYPES)}")
        dtype = _DTYPES[mixed_precision]
        if self.fsdp_version == 1:
            buffers = torch.float32 if buffer_autocast else dtype
            self.mixed_precision_policy = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=buffers)
        else:
            self.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype
            )

    def validate_mixed_precision_policy(self) -> None:
        """Raises SettingError if the policy is not of this version's class."""
        wanted = self._policy_class()
        if not isinstance(self.mixed_precision_policy, wanted):
            raise SettingError(
                f"mixed_precision_policy={self.mixed_precision_policy!r} is a "
                f"{type(self.mixed_precision_policy).__name__}: fsdp_version={self.fsdp_version} takes "
                f"{wanted.__name__}, a dict of its arguments, or a name"
            )

    def _policy_class(self) -> Any:
        return MixedPrecision if self.fsdp_version == 1 else MixedPrecisionPolicy

    def set_cpu_offload(self) -> None:
        """Turn a bool into this version's class."""
        if isinstance(self.cpu_offload, bool):
            if self.fsdp_version == 1:
                self.cpu_offload = CPUOffload(offload_params=self.cpu_offload)
            else:
                self.cpu_offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()
        self.validate_cpu_offload()

    def validate_cpu_offload(self) -> None:
        """Raises SettingError if the field is not of this version's class."""
        wanted: Any = CPUOffload if self.fsdp_version == 1 else OffloadPolicy
        if not isinstance(self.cpu_offload, wanted):
            raise SettingError(
                f"cpu_offload={self.cpu_offload!r} is a {type(self.cpu_offload).__name__}: fsdp_version="
                f"{self.fsdp_version} takes a bool or {wanted.__name__}"
            )

    @property
    def offloads(self) -> bool:
        """Whether parameters stay on the CPU."""
        if self.fsdp_version == 1:
            return bool(self.cpu_offload.offload_params)
        return isinstance(self.cpu_offload, CPUOffloadPolicy)

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose the form of state dicts, and the configurations that belong to it where none was given."""
        kind = _member("state_dict_type", state_dict_type or self.state_dict_type, StateDictType)
        if self.fsdp_version == 2 and kind.name not in FSDP2_STATE_DICT_TYPE:
            raise SettingError(
                f"state_dict_type={kind.name!r} is for fsdp_version=1: use one of {', '.join(FSDP2_STATE_DICT_TYPE)}"
            )
        changed = state_dict_type is not None and kind is not self.state_dict_type
        self.state_dict_type = kind
        if kind is StateDictType.FULL_STATE_DICT:
            model: Any = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            optimizer: Any = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
        elif kind is StateDictType.SHARDED_STATE_DICT:
            model = ShardedStateDictConfig(offload_to_cpu=True)
            optimizer = ShardedOptimStateDictConfig(offload_to_cpu=True)
        else:
            return
        if changed or self.state_dict_config is None:
            self.state_dict_config = model
        if changed or self.optim_state_dict_config is None:
            self.optim_state_dict_config = optimizer


def _reshard_after_forward(given: Any) -> bool:
    """Version 2's switch, from an argument, its variable, or version 1's strategy in the environment."""
    if isinstance(given, bool):
        return given
    if given is None:
        given = setting("fsdp_reshard_after_forward")
    if given is None:
        by_strategy = {"FULL_SHARD": True, "1": True, "SHARD_GRAD_OP": False, "2": False, None: True}
        strategy = setting("fsdp_sharding_strategy")
        if strategy not in by_strategy:
            raise SettingError(
                f"fsdp_sharding_strategy={strategy!r} is for fsdp_version=1: fully_shard takes fsdp_reshard_after_"
                "forward, and the hybrid ones by ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)"
            )
        return by_strategy[strategy]
    words = {"true": True, "1": True, "false": False, "0": False}
    if str(given).lower() not in words:
        raise SettingError(f"reshard_after_forward={given!r} is not allowed with fsdp_version=2: give True or False")
    return words[str(given).lower()]


def _member(name: str, given: Any, kind: Any) -> Any:
    """A member of an enum, from itself, its name or its number."""
    if isinstance(given, kind):
        return given
    if isinstance(given, str) and given.upper() in kind.__members__:
        return kind[given.upper()]
    by_number = {str(member.value): member for member in kind}
    if str(given) in by_number:
        return by_number[str(given)]
    raise SettingError(f"{name}={given!r} does not exist: use one of {', '.join(kind.__members__)}")
