"""Settings of FSDP, as a launcher hands them on."""

from functools import partial

from accel_state.settings.model import Setting, handed_on

_row = partial(handed_on, "fsdp_config", "")

SETTINGS: tuple[Setting, ...] = (
    _row("fsdp_version", int, "1, or 2 for fully_shard."),
    _row(
        "fsdp_sharding_strategy",
        str,
        "What is sharded: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2, or its number.",
    ),
    _row(
        "fsdp_reshard_after_forward",
        str,
        "Free gathered parameters after forward: true, false, or a sharding strategy for version 1.",
    ),
    _row("fsdp_offload_params", bool, "Keep parameters and gradients on the CPU."),
    _row("fsdp_min_num_params", int, "The size from which SIZE_BASED_WRAP shards a module of its own."),
    _row(
        "fsdp_auto_wrap_policy",
        str,
        "Which modules are sharded by themselves: TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP.",
    ),
    _row(
        "fsdp_transformer_layer_cls_to_wrap",
        str,
        "Names of the classes that TRANSFORMER_BASED_WRAP shards, with commas between.",
        env="FSDP_TRANSFORMER_CLS_TO_WRAP",
    ),
    _row(
        "fsdp_backward_prefetch",
        str,
        "When the next parameters are gathered in backward: BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH.",
    ),
    _row(
        "fsdp_state_dict_type", str, "How weights are saved: FULL_STATE_DICT, LOCAL_STATE_DICT or SHARDED_STATE_DICT."
    ),
    _row("fsdp_forward_prefetch", bool, "Gather the next parameters in forward before they are needed."),
    _row("fsdp_use_orig_params", bool, "Keep the parameters as they were, for version 1."),
    _row("fsdp_cpu_ram_efficient_loading", bool, "Let only rank 0 read the weights."),
    _row("fsdp_sync_module_states", bool, "Give all ranks the weights of rank 0."),
    _row("fsdp_activation_checkpointing", bool, "Compute activations anew in backward."),
    _row("fsdp_activation_checkpointing_offload", bool, "Keep the activations that are kept on the CPU."),
)
