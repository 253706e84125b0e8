"""Settings of a mesh of several parallel axes, as a launcher hands them on."""

from functools import partial

from accel_state.settings.model import Setting, handed_on

_row = partial(handed_on, "parallelism_config", "")

SETTINGS: tuple[Setting, ...] = (
    _row("parallelism_config_dp_replicate_size", int, "Replicas of the sharded model."),
    _row("parallelism_config_dp_shard_size", int, "Ranks that share the parameters of a replica."),
    _row("parallelism_config_tp_size", int, "Ranks that share each matrix."),
    _row("parallelism_config_cp_size", int, "Ranks that share a sequence in attention by rotation or gathering."),
    _row("parallelism_config_sp_size", int, "Ranks that share a sequence in attention by heads."),
    _row("parallelism_config_pp_size", int, "Stages of a pipeline."),
    _row("parallelism_config_cp_backend", str, "Who carries out context parallelism: torch."),
    _row("parallelism_config_cp_comm_strategy", str, "How keys and values travel: allgather or alltoall."),
    _row("parallelism_config_sp_backend", str, "Who carries out sequence parallelism: native or deepspeed."),
    _row("parallelism_config_sp_seq_length", int, "The length of all sequences, where it is one."),
    _row("parallelism_config_sp_seq_length_is_variable", bool, "Whether sequences differ in length."),
    _row(
        "parallelism_config_sp_attn_implementation",
        str,
        "The attention that is shared: sdpa, flash_attention_2 or flash_attention_3.",
    ),
)
