"""Every setting of accel: one row each, read from an argument, the environment, or its default.

Rows lie in one file per concern (`device.py`, `training.py`, `fsdp.py`, `launching.py`, ...). A new setting is a new
row: flags, `accel env` and the variables that the launcher hands to its workers follow from it.
"""

from accel_state.settings.model import UNSET as UNSET
from accel_state.settings.model import Resolved as Resolved
from accel_state.settings.model import Setting as Setting
from accel_state.settings.resolution import resolve as resolve
from accel_state.settings.resolution import setting as setting
from accel_state.settings.resolution import unknown_variables as unknown_variables
from accel_state.settings.resolution import warn_unknown_variables as warn_unknown_variables
from accel_state.settings.resolution import worker_environment as worker_environment
from accel_state.settings.table import all_settings as all_settings
from accel_state.settings.table import find_setting as find_setting

__all__ = [
    "UNSET",
    "Resolved",
    "Setting",
    "all_settings",
    "find_setting",
    "resolve",
    "setting",
    "unknown_variables",
    "warn_unknown_variables",
    "worker_environment",
]
