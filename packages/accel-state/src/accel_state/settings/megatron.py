"""Settings of Megatron-LM, as a launcher hands them on."""

from functools import partial

from accel_state.settings.model import Setting, handed_on

_row = partial(handed_on, "megatron_lm_config", "")

SETTINGS: tuple[Setting, ...] = (
    _row("megatron_lm_tp_degree", int, "Ranks that share each matrix."),
    _row("megatron_lm_pp_degree", int, "Ranks that hold the layers one after the other."),
    _row("megatron_lm_num_micro_batches", int, "Micro-batches in a pipeline's update."),
    _row("megatron_lm_sequence_parallelism", bool, "Share the sequence too, outside of matrices."),
    _row("megatron_lm_recompute_activations", bool, "Compute activations anew in backward."),
    _row("megatron_lm_use_distributed_optimizer", bool, "Share the optimizer's state."),
    _row("megatron_lm_gradient_clipping", float, "The norm that gradients are clipped to; 0 does not clip."),
    _row("megatron_lm_use_custom_fsdp", bool, "Shard by Megatron's own FSDP."),
    _row("megatron_lm_no_load_optim", bool, "Load no optimizer state."),
    _row("megatron_lm_no_save_optim", bool, "Save no optimizer state."),
    _row("megatron_lm_eod_mask_loss", bool, "Leave ends of documents out of the loss."),
    _row("megatron_lm_optimizer_cpu_offload", bool, "Keep the optimizer's state on the CPU."),
    _row(
        "megatron_lm_overlap_cpu_optimizer_d2h_h2d", bool, "Copy the state of an offloaded optimizer while computing."
    ),
    _row("megatron_lm_use_precision_aware_optimizer", bool, "Keep the optimizer's state in fewer bits."),
    _row("megatron_lm_decoder_last_pipeline_num_layers", int, "Layers of the last rank of a pipeline."),
    _row("megatron_lm_recompute_granularity", str, "What is computed anew: full or selective."),
    _row("megatron_lm_recompute_method", str, "Which layers are computed anew: uniform or block."),
    _row("megatron_lm_recompute_num_layers", int, "Layers that are computed anew together."),
    _row("megatron_lm_attention_backend", bool, "Whether Megatron chooses the attention."),
    _row("megatron_lm_expert_model_parallel_size", int, "Ranks that share the experts."),
    _row("megatron_lm_expert_tensor_parallel_size", int, "Ranks that share each expert's matrices."),
    _row("megatron_lm_context_parallel_size", int, "Ranks that share a sequence."),
    _row("megatron_lm_attention_dropout", float, "The probability of dropout in attention."),
    _row("megatron_lm_hidden_dropout", float, "The probability of dropout in hidden layers."),
    _row("megatron_lm_attention_softmax_in_fp32", bool, "Compute attention's softmax in float32."),
    _row("megatron_lm_calculate_per_token_loss", bool, "Weigh the loss by tokens."),
    _row("megatron_lm_use_rotary_position_embeddings", bool, "Rotate positions in."),
)
