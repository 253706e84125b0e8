"""Experiment trackers behind one small interface."""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "aim": ["AimTracker"],
        "base": ["GeneralTracker", "on_main_process"],
        "clearml": ["ClearMLTracker"],
        "comet_ml": ["CometMLTracker"],
        "dvclive": ["DVCLiveTracker"],
        "jsonl": ["JsonlTracker"],
        "logger_type": ["LoggerType"],
        "mlflow": ["MLflowTracker"],
        "null": ["NullTracker"],
        "profiling": [
            "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION",
            "PROFILE_PATTERN_NAME",
            "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
            "ProfileKwargs",
            "profile",
        ],
        "registry": ["LOGGER_TYPE_TO_CLASS", "filter_trackers", "get_available_trackers", "register_tracker_class"],
        "swanlab": ["SwanLabTracker"],
        "tensorboard": ["TensorBoardTracker"],
        "tracker_set": ["TrackerSet"],
        "trackio": ["TrackioTracker"],
        "values": ["mask_secrets"],
        "wandb": ["WandBTracker"],
    },
)

if TYPE_CHECKING:
    from .aim import AimTracker as AimTracker
    from .base import GeneralTracker as GeneralTracker
    from .base import on_main_process as on_main_process
    from .clearml import ClearMLTracker as ClearMLTracker
    from .comet_ml import CometMLTracker as CometMLTracker
    from .dvclive import DVCLiveTracker as DVCLiveTracker
    from .jsonl import JsonlTracker as JsonlTracker
    from .logger_type import LoggerType as LoggerType
    from .mlflow import MLflowTracker as MLflowTracker
    from .null import NullTracker as NullTracker
    from .profiling import MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION
    from .profiling import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME
    from .profiling import XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
    from .profiling import ProfileKwargs as ProfileKwargs
    from .profiling import profile as profile
    from .registry import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
    from .registry import filter_trackers as filter_trackers
    from .registry import get_available_trackers as get_available_trackers
    from .registry import register_tracker_class as register_tracker_class
    from .swanlab import SwanLabTracker as SwanLabTracker
    from .tensorboard import TensorBoardTracker as TensorBoardTracker
    from .tracker_set import TrackerSet as TrackerSet
    from .trackio import TrackioTracker as TrackioTracker
    from .values import mask_secrets as mask_secrets
    from .wandb import WandBTracker as WandBTracker
