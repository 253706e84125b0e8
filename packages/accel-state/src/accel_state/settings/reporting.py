"""Settings of what a run says about itself."""

from accel_state.settings.model import Setting, define

SETTINGS: tuple[Setting, ...] = (
    define(
        "log_level",
        str,
        None,
        "The level of accel's loggers; the root logger's by default.",
        flags=(),
        choices=("debug", "info", "warning", "error", "critical"),
    ),
    define("enable_rich", bool, False, "Show tracebacks by rich.", flags=()),
    define("debug", bool, False, "Check more, at a cost: collectives name who disagrees.", env="ACCEL_DEBUG_MODE"),
)
