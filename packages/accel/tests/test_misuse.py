"""Methods of the Accelerator that are given something else than they take: each says what it takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_state.errors import (
    AccelError,
    DataLoaderError,
    NotPreparedError,
    PlanError,
    PrecisionError,
    SettingError,
    TrackerError,
)

MODEL = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), 0.1)
LOADER = torch.utils.data.DataLoader(torch.randn(4, 2))

CALLS = {
    "accumulate": (lambda a: a.accumulate(3), PlanError, "takes models"),
    "no_sync": (lambda a: a.no_sync("model"), PlanError, "takes models"),
    "backward": (lambda a: a.backward(1.0), PlanError, "as a tensor"),
    "clip a model": (lambda a: a.clip_grad_norm_(MODEL, 1.0), PlanError, r"model\.parameters\(\)"),
    "clip below zero": (lambda a: a.clip_grad_norm_(MODEL.parameters(), -1), PlanError, "at least 0"),
    "unscale": (lambda a: a.unscale_gradients(OPTIMIZER), NotPreparedError, "what prepare\\(\\) returned"),
    "prepare_model": (lambda a: a.prepare_model(3), SettingError, r"takes a torch\.nn\.Module"),
    "prepare_optimizer": (lambda a: a.prepare_optimizer(MODEL), SettingError, r"takes a torch\.optim\.Optimizer"),
    "prepare_scheduler": (lambda a: a.prepare_scheduler(OPTIMIZER), SettingError, "takes a learning-rate scheduler"),
    "prepare_data_loader": (lambda a: a.prepare_data_loader([1]), DataLoaderError, "takes a torch DataLoader"),
    "placement": (lambda a: a.prepare(MODEL, device_placement=[True, False]), SettingError, "one bool per object"),
    "skip what": (lambda a: a.skip_first_batches([1], 1), DataLoaderError, "takes a DataLoader"),
    "skip how many": (lambda a: a.skip_first_batches(LOADER, "1"), DataLoaderError, "whole number"),
    "autocast": (lambda a: a.autocast({"enabled": False}), PrecisionError, "takes an AutocastKwargs"),
    "profile": (lambda a: a.profile("cpu").__enter__(), SettingError, "takes a ProfileKwargs"),
    "checkpointing": (lambda a: a.register_for_checkpointing(3), SettingError, r"3 \(int\)"),
    "save hook": (lambda a: a.register_save_state_pre_hook("hook"), SettingError, "cannot be called"),
    "load hook": (lambda a: a.register_load_state_pre_hook(None), SettingError, "cannot be called"),
    "init_trackers": (lambda a: a.init_trackers(3), TrackerError, "give a text"),
    "get_tracker": (lambda a: a.get_tracker("wandb"), TrackerError, "asked for: none"),
    "decorator": (lambda a: a.on_main_process(3), TypeError, "3 is none"),
    "forward method": (lambda a: a.register_forward_method(MODEL, "encode"), PlanError, "no method 'encode'"),
    "forward_backward": (
        lambda a: a.forward_backward(torch.ones(1), loss_function=torch.sum),
        SettingError,
        "prepared models",
    ),
    "shard size": (lambda a: a.save_model(MODEL, "x", max_shard_size="5XB"), AccelError, "is not a size"),
    "state dict": (lambda a: a.get_state_dict(3), PlanError, "takes models"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_named(name):
    call, error, said = CALLS[name]
    with pytest.raises(error, match=said):
        call(Accelerator(cpu=True))
