"""A small training run for either library: save, or load and print what came back, on each of its ranks.

Run in processes of its own: `peer_run.py LIBRARY save|load DIRECTORY OPTIONS`. The directory is the checkpoint's or,
with the option `automatic`, the project's; other options are those of `save_state`.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import warnings

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader


class Counter:
    n = 0

    def state_dict(self):
        return {"n": self.n, "history": torch.arange(3)}

    def load_state_dict(self, state):
        self.n = state["n"]


class Net(nn.Module):
    """Batch norm for buffers and integers, tied weights for aliases."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.one = nn.Linear(8, 8, bias=False)
        self.two = nn.Linear(8, 8, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.one(self.body(x)))


def main(library: str, action: str, directory: str, options_text: str) -> None:
    module, options = importlib.import_module(library), json.loads(options_text)
    utils = importlib.import_module(f"{library}.utils")
    place = [] if options.pop("automatic", False) else [directory]
    config = utils.ProjectConfiguration(project_dir=directory, automatic_checkpoint_naming=not place)
    accelerator = module.Accelerator(cpu=True, project_config=config)
    utils.set_seed(7 if action == "save" else 8)
    nets = [Net(), nn.Linear(4, 2)]
    optimizers = [torch.optim.AdamW(nets[0].parameters(), lr=0.01), torch.optim.SGD(nets[1].parameters(), momentum=0.9)]
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 2)
    data = DataLoader(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), batch_size=4)
    *prepared, schedule, data = accelerator.prepare(*nets, *optimizers, schedule, data)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)

    def update() -> float:
        loss = sum(net(batch).square().mean() for batch in data for net in prepared[:2])
        accelerator.backward(loss)
        for step in (*prepared[2:], schedule):
            step.step()
        for optimizer in prepared[2:]:
            optimizer.zero_grad()
        return float(loss)

    if action == "save":
        counter.n = 5
        utils.set_seed(7, device_specific=True)
        for _ in range(3):
            update()
        for _ in range(1 if place else 2):
            accelerator.save_state(*place, **options)
    else:
        accelerator.load_state(*place)
        if not place:
            accelerator.save_state()
    draws = [random.random(), float(np.random.rand()), float(torch.rand(1))]  # noqa: NPY002 - the global generator
    found = [counter.n, draws, [update() for _ in range(3)], schedule.get_last_lr()]
    told = utils.gather_object([found])
    if accelerator.is_main_process:
        print(json.dumps(told))
    if accelerator.num_processes > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
