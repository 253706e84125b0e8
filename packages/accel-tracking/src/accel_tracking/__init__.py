"""Experiment trackers behind one small interface."""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "base": ["GeneralTracker", "on_main_process"],
        "jsonl": ["JsonlTracker"],
        "logger_type": ["LoggerType"],
        "null": ["NullTracker"],
        "registry": ["LOGGER_TYPE_TO_CLASS", "filter_trackers", "get_available_trackers", "register_tracker_class"],
        "tensorboard": ["TensorBoardTracker"],
        "tracker_set": ["TrackerSet"],
        "values": ["mask_secrets"],
    },
)

if TYPE_CHECKING:
    from .base import GeneralTracker as GeneralTracker
    from .base import on_main_process as on_main_process
    from .jsonl import JsonlTracker as JsonlTracker
    from .logger_type import LoggerType as LoggerType
    from .null import NullTracker as NullTracker
    from .registry import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
    from .registry import filter_trackers as filter_trackers
    from .registry import get_available_trackers as get_available_trackers
    from .registry import register_tracker_class as register_tracker_class
    from .tensorboard import TensorBoardTracker as TensorBoardTracker
    from .tracker_set import TrackerSet as TrackerSet
    from .values import mask_secrets as mask_secrets
