"""What single axes of a mesh are told beyond their size, with the peer's names."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from accel_state.errors import SettingError
from accel_state.settings import setting

CP_COMM_STRATEGIES = ("allgather", "alltoall")
SP_ATTENTIONS = ("flash_attention_2", "flash_attention_3", "sdpa")


@dataclass
class TorchTensorParallelConfig:
    """Options of the tp axis.

    Args:
        enable_async_tp: overlap the communication of a layer with its computation. Torch offers no switch for it
            outside its compiler, so it warns.
        plan: which modules are shared, see `tensor_parallel`; None takes the model's own.
    """

    enable_async_tp: bool = False
    plan: Any = None

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warnings.warn(
                "enable_async_tp=True has no effect: torch overlaps tensor parallelism only inside its compiler, by "
                "torch._inductor.config. Leave it out.",
                stacklevel=3,
            )


@dataclass
class TorchContextParallelConfig:
    """Options of the cp axis.

    Args:
        cp_comm_strategy: how keys and values travel, "allgather" or "alltoall" (a ring). None takes
            ACCEL_PARALLELISM_CONFIG_CP_COMM_STRATEGY, else "allgather".

    Raises:
        SettingError: a strategy that does not exist.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        if self.cp_comm_strategy is None:
            self.cp_comm_strategy = setting("parallelism_config_cp_comm_strategy") or "allgather"
        if self.cp_comm_strategy not in CP_COMM_STRATEGIES:
            raise SettingError(
                f"cp_comm_strategy={self.cp_comm_strategy!r} does not exist: use one of {', '.join(CP_COMM_STRATEGIES)}"
            )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of the sp axis.

    Args:
        sp_seq_length: the length of all sequences, where it is one.
        sp_seq_length_is_variable: whether sequences differ in length; default True.
        sp_attn_implementation: the attention that is shared, one of `SP_ATTENTIONS`.
        None of the three takes its ACCEL_PARALLELISM_CONFIG_* variable.

    Raises:
        SettingError: an attention that cannot be shared, or neither a fixed nor a variable length.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        for name in ("sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"):
            if getattr(self, name) is None:
                setattr(self, name, setting(f"parallelism_config_{name}"))
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = True
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise SettingError("sp_seq_length_is_variable=False needs the length: give sp_seq_length")
        if self.sp_attn_implementation not in (None, *SP_ATTENTIONS):
            raise SettingError(
                f"sp_attn_implementation={self.sp_attn_implementation!r} cannot be shared over ranks: use one of "
                f"{', '.join(SP_ATTENTIONS)}"
            )


@dataclass
class TorchTensorParallelPlugin:
    """Deprecated: `ParallelismConfig(tp_size=...)` says the same.

    Args:
        tp_size: ranks that share each matrix.
        torch_device_mesh: a mesh that the caller made, with an axis "tp".
    """

    tp_size: int = 1
    torch_device_mesh: Any = None
