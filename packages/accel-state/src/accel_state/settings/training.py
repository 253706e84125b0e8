"""Settings of the training loop."""

from accel_state.settings.model import Setting, define

SETTINGS: tuple[Setting, ...] = (
    define(
        "mixed_precision",
        str,
        "no",
        "The numbers that the model computes in.",
        choices=("no", "fp16", "bf16", "fp8"),
    ),
    define(
        "gradient_accumulation_steps",
        int,
        1,
        "Micro-batches whose gradients are summed before an update.",
        minimum=1,
    ),
    define(
        "time_limit_s",
        int,
        None,
        "Seconds after which `should_stop` turns true, from where the Accelerator is made; no limit by default.",
        minimum=1,
    ),
)
