"""`ProjectConfiguration` and the constants, as the peer has them."""

from __future__ import annotations

import accel_ckpt
from accel_ckpt import ProjectConfiguration


def test_the_logging_directory_follows_only_if_there_is_none():
    assert ProjectConfiguration(project_dir="x").logging_dir == "x"
    config = ProjectConfiguration("x", "logs", True, 3, 5, True)
    config.set_directories("y")
    assert (config.project_dir, config.logging_dir) == ("y", "logs")
    assert (config.automatic_checkpoint_naming, config.total_limit) == (True, 3)
    assert (config.iteration, config.save_on_each_node) == (5, True)
    config = ProjectConfiguration()
    config.set_directories("y")
    assert config.logging_dir == "y"


def test_the_names_are_the_peers():
    assert {name: getattr(accel_ckpt, name) for name in accel_ckpt.__all__ if name.isupper()} == {
        "MODEL_NAME": "pytorch_model",
        "OPTIMIZER_NAME": "optimizer",
        "RNG_STATE_NAME": "random_states",
        "SAFE_MODEL_NAME": "model",
        "SAFE_WEIGHTS_INDEX_NAME": "model.safetensors.index.json",
        "SAFE_WEIGHTS_NAME": "model.safetensors",
        "SAFE_WEIGHTS_PATTERN_NAME": "model{suffix}.safetensors",
        "SAMPLER_NAME": "sampler",
        "SCALER_NAME": "scaler.pt",
        "SCHEDULER_NAME": "scheduler",
        "WEIGHTS_INDEX_NAME": "pytorch_model.bin.index.json",
        "WEIGHTS_NAME": "pytorch_model.bin",
        "WEIGHTS_PATTERN_NAME": "pytorch_model{suffix}.bin",
    }


def test_every_public_name_resolves():
    assert all(hasattr(accel_ckpt, name) for name in accel_ckpt.__all__)
