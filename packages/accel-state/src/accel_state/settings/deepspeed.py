"""Settings of DeepSpeed, as a launcher hands them on."""

from functools import partial

from accel_state.settings.model import Setting, handed_on

_row = partial(handed_on, "deepspeed_config", "ACCELERATE_")

SETTINGS: tuple[Setting, ...] = (
    _row(
        "zero_stage",
        int,
        "What is sharded: 1 optimizer state, 2 gradients too, 3 parameters too.",
        env="DEEPSPEED_ZERO_STAGE",
    ),
    _row(
        "offload_optimizer_device",
        str,
        "Where the optimizer's state lies: none, cpu or nvme.",
        env="DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    ),
    _row("offload_param_device", str, "Where parameters lie: none, cpu or nvme.", env="DEEPSPEED_OFFLOAD_PARAM_DEVICE"),
    _row(
        "offload_optimizer_nvme_path",
        str,
        "The folder for the optimizer's state on nvme.",
        env="DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    ),
    _row("offload_param_nvme_path", str, "The folder for parameters on nvme.", env="DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"),
    _row("zero3_init_flag", bool, "Make the model sharded from the start.", env="DEEPSPEED_ZERO3_INIT"),
    _row(
        "zero3_save_16bit_model",
        bool,
        "Gather 16-bit weights when a model of stage 3 is saved.",
        env="DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    ),
    _row("gradient_clipping", float, "The norm that gradients are clipped to."),
    _row("deepspeed_config_file", str, "A configuration of DeepSpeed's own."),
    _row("deepspeed_moe_layer_cls_names", str, "Names of the classes that hold experts, with commas between."),
    _row(
        "deepspeed_fields_from_accelerate_config",
        str,
        "Fields that a configuration file gave, with commas between.",
        env="CONFIG_DS_FIELDS",
        flags=(),
    ),
)
