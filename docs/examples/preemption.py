"""Preemption: told to stop, a run saves at the next update, leaves with a code of its own, and later goes on.

    accel launch --cpu --num-processes 2 --time-limit-s 5 docs/examples/preemption.py
    accel launch --cpu --num-processes 2 docs/examples/preemption.py

SIGTERM, Slurm's SIGUSR1 or `--time-limit-s`, on any rank: `should_stop` becomes true on all of them after the same
update. Exit code 75 tells schedulers that the run is to be started again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import STOPPED_EXIT_CODE, Accelerator, ProjectConfiguration, set_seed


class Progress:
    """Where the run stands; part of every checkpoint."""

    def __init__(self) -> None:
        self.epoch = 0
        self.update = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--project-dir", type=Path, default=Path("runs/preemption"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    accelerator = Accelerator(
        project_config=ProjectConfiguration(
            project_dir=str(args.project_dir), automatic_checkpoint_naming=True, total_limit=1
        )
    )
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(digits, args.batch_size, shuffle=True))
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    try:
        accelerator.load_state()
        accelerator.print(f"goes on after update {progress.update}", flush=True)
    except FileNotFoundError:
        accelerator.print("starts from the beginning", flush=True)

    for epoch in range(progress.epoch, args.epochs):
        progress.epoch = epoch
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.update += 1
            if accelerator.should_stop:  # asked once per update, on every rank
                accelerator.save_state()
                accelerator.print(f"stopped after update {progress.update}", flush=True)
                accelerator.close()
                sys.exit(STOPPED_EXIT_CODE)
        if epoch % 10 == 0:
            accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    accelerator.print(f"finished after update {progress.update}")
    accelerator.close()


if __name__ == "__main__":
    main()
