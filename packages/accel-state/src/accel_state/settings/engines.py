"""Settings by which a launcher asks for a way of running the model; whoever cannot honour one refuses it."""

from accel_state.settings.model import Setting, define

SETTINGS: tuple[Setting, ...] = (
    define("use_fsdp", bool, False, "Shard the model with FSDP."),
    define("use_deepspeed", bool, False, "Run the model in DeepSpeed's engine."),
    define("use_megatron_lm", bool, False, "Run the model in Megatron-LM's engine."),
    define("use_parallelism_config", bool, False, "Lay a mesh of several parallel axes over the ranks."),
    define(
        "dynamo_backend",
        str,
        "no",
        "The backend of torch.compile; `no` does not compile.",
        yaml="dynamo_config.dynamo_backend",
    ),
)
