"""Settings of torch.compile, as a launcher hands them on."""

from functools import partial

from accel_state.settings.model import Setting, handed_on

_row = partial(handed_on, "dynamo_config", "ACCELERATE_")

SETTINGS: tuple[Setting, ...] = (
    _row("dynamo_mode", str, "The mode of torch.compile: default, reduce-overhead or max-autotune."),
    _row("dynamo_use_fullgraph", bool, "Refuse to compile a model in several graphs."),
    _row("dynamo_use_dynamic", bool, "Compile for changing shapes."),
    _row("dynamo_use_regional_compilation", bool, "Compile the repeated block once instead of the whole model."),
)
