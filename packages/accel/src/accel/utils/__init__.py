"""The helpers that users import by name, each from the package that owns it.

The names, and who owns each, stand in `accel/compat/table.txt`, in the lines of `accelerate.utils` and its modules.
"""

# ruff: noqa: F403  the stars below are for type checkers only
from __future__ import annotations

from typing import TYPE_CHECKING

from accel.compat.places import lazy_names
from accel.compat.table import places

_NAMES = {
    name: owner
    for place, names in places().items()
    if f"{place}.".startswith("accelerate.utils.")
    for name, owner in names.items()
}

__getattr__, __dir__ = lazy_names(__name__, globals(), _NAMES)

if TYPE_CHECKING:
    from accel.fsdp_states import load_fsdp_model as load_fsdp_model
    from accel.fsdp_states import load_fsdp_optimizer as load_fsdp_optimizer
    from accel.fsdp_states import save_fsdp_model as save_fsdp_model
    from accel.fsdp_states import save_fsdp_optimizer as save_fsdp_optimizer
    from accel.utils.progress import tqdm as tqdm
    from accel_ckpt import *
    from accel_data import *
    from accel_launch import *
    from accel_parallel import *
    from accel_precision import *
    from accel_state import *
    from accel_tracking import *
