"""Settings of 8-bit floats, as a launcher hands them on."""

from functools import partial

from accel_state.settings.model import Setting, handed_on

_row = partial(handed_on, "fp8_config", "ACCELERATE_")

SETTINGS: tuple[Setting, ...] = (
    _row("fp8_backend", str, "Who computes: ao, te or msamp."),
    _row("fp8_format", str, "The format: HYBRID, E4M3 or E5M2."),
    _row("fp8_use_autocast_during_eval", bool, "Compute so in evaluation too."),
    _row("fp8_margin", int, "The margin of the scale."),
    _row("fp8_interval", int, "Updates between new scales."),
    _row("fp8_amax_history_len", int, "Updates that a scale looks back on."),
    _row("fp8_amax_compute_algo", str, "How it looks back: max or most_recent."),
    _row("fp8_override_fprop", bool, "Compute forward in more bits.", flags=()),
    _row("fp8_override_dgrad", bool, "Compute gradients of inputs in more bits.", flags=()),
    _row("fp8_override_wgrad", bool, "Compute gradients of weights in more bits.", flags=()),
    _row("fp8_opt_level", str, "The level of msamp: O1 or O2."),
    _row("fp8_enable_fsdp_float8_all_gather", bool, "Gather sharded parameters in 8 bits."),
    _row("fp8_pad_inner_dim", bool, "Pad matrices whose inner dimension does not divide by 16."),
)
