"""Transactional, pickle-free checkpoints for PyTorch that load on any world size."""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from .buffers import CopyBuffers as CopyBuffers
    from .checkpointer import Checkpointer as Checkpointer
    from .checkpointer import list_checkpoints as list_checkpoints
    from .codec import Codec as Codec
    from .codec import dataclass_codec as dataclass_codec
    from .commands import merge_command as merge_command
    from .commands import merge_command_parser as merge_command_parser
    from .commit import remove_checkpoint as remove_checkpoint
    from .convert import convert_to_accelerate as convert_to_accelerate
    from .dcp import convert_to_dcp as convert_to_dcp
    from .dcp_states import load_dcp as load_dcp
    from .dcp_states import load_whole as load_whole
    from .dcp_states import save_dcp as save_dcp
    from .export import save as save
    from .export import save_model as save_model
    from .loading import LoadedCheckpoint as LoadedCheckpoint
    from .loading import is_committed_checkpoint as is_committed_checkpoint
    from .loading import load_checkpoint as load_checkpoint
    from .loading import verify_checkpoint as verify_checkpoint
    from .manifest import Manifest as Manifest
    from .merging import merge_fsdp_weights as merge_fsdp_weights
    from .names import MODEL_NAME as MODEL_NAME
    from .names import OPTIMIZER_NAME as OPTIMIZER_NAME
    from .names import RNG_STATE_NAME as RNG_STATE_NAME
    from .names import SAFE_MODEL_NAME as SAFE_MODEL_NAME
    from .names import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
    from .names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
    from .names import SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
    from .names import SAMPLER_NAME as SAMPLER_NAME
    from .names import SCALER_NAME as SCALER_NAME
    from .names import SCHEDULER_NAME as SCHEDULER_NAME
    from .names import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
    from .names import WEIGHTS_NAME as WEIGHTS_NAME
    from .names import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME
    from .peer import AccelerateCheckpoint as AccelerateCheckpoint
    from .peer import is_accelerate_checkpoint as is_accelerate_checkpoint
    from .peer import load_accelerate_checkpoint as load_accelerate_checkpoint
    from .peer import load_accelerator_state as load_accelerator_state
    from .peer import open_accelerate_checkpoint as open_accelerate_checkpoint
    from .peer_files import save_accelerator_state as save_accelerator_state
    from .peer_files import write_accelerate_files as write_accelerate_files
    from .project import ProjectConfiguration as ProjectConfiguration
    from .retention import CheckpointInfo as CheckpointInfo
    from .retention import Keep as Keep
    from .retention import best as best
    from .retention import every as every
    from .retention import latest as latest
    from .saving import SaveHandle as SaveHandle
    from .saving import save_checkpoint as save_checkpoint
    from .saving import save_in_background as save_in_background
    from .weights import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
    from .weights import load as load
    from .weights import load_custom_state as load_custom_state
    from .weights import load_state_dict as load_state_dict
    from .weights import locate_weights as locate_weights
    from .weights import read_weights as read_weights
    from .weights import save_custom_state as save_custom_state

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "checkpointer": ["Checkpointer", "list_checkpoints"],
        "retention": ["CheckpointInfo", "Keep", "best", "every", "latest"],
        "saving": ["SaveHandle", "save_checkpoint", "save_in_background"],
        "buffers": ["CopyBuffers"],
        "loading": ["LoadedCheckpoint", "is_committed_checkpoint", "load_checkpoint", "verify_checkpoint"],
        "manifest": ["Manifest"],
        "commit": ["remove_checkpoint"],
        "convert": ["convert_to_accelerate"],
        "peer": [
            "AccelerateCheckpoint",
            "is_accelerate_checkpoint",
            "load_accelerate_checkpoint",
            "load_accelerator_state",
            "open_accelerate_checkpoint",
        ],
        "peer_files": ["save_accelerator_state", "write_accelerate_files"],
        "dcp": ["convert_to_dcp"],
        "dcp_states": ["load_dcp", "load_whole", "save_dcp"],
        "merging": ["merge_fsdp_weights"],
        "commands": ["merge_command", "merge_command_parser"],
        "export": ["save", "save_model"],
        "weights": [
            "clean_state_dict_for_safetensors",
            "load",
            "load_custom_state",
            "load_state_dict",
            "locate_weights",
            "read_weights",
            "save_custom_state",
        ],
        "codec": ["Codec", "dataclass_codec"],
        "project": ["ProjectConfiguration"],
        "names": [
            "MODEL_NAME",
            "OPTIMIZER_NAME",
            "RNG_STATE_NAME",
            "SAFE_MODEL_NAME",
            "SAFE_WEIGHTS_INDEX_NAME",
            "SAFE_WEIGHTS_NAME",
            "SAFE_WEIGHTS_PATTERN_NAME",
            "SAMPLER_NAME",
            "SCALER_NAME",
            "SCHEDULER_NAME",
            "WEIGHTS_INDEX_NAME",
            "WEIGHTS_NAME",
            "WEIGHTS_PATTERN_NAME",
        ],
    },
)
