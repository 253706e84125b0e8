"""Checkpoints: stop anywhere, go on at the very sample where it stopped, and end with the same weights.

    accel launch --cpu --num-processes 2 docs/examples/checkpointing.py --stop-after 50
    accel launch --cpu --num-processes 2 docs/examples/checkpointing.py --resume

A checkpoint is all or nothing: a run killed while it writes one goes on from the one before. It can be loaded on
another number of processes too.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, ProjectConfiguration, set_seed


class Progress:
    """Where the run stands: anything with these two methods can be part of a checkpoint."""

    def __init__(self) -> None:
        self.epoch = 0
        self.update = 0

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def digest(model: nn.Module) -> str:
    """A word that two models share only if all their weights are equal, bit by bit."""
    values = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(values).hexdigest()[:12]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--project-dir", type=Path, default=Path("runs/checkpointing"))
    parser.add_argument("--save-every", type=int, default=25, help="updates between checkpoints")
    parser.add_argument("--stop-after", type=int, help="leave after so many updates, as if the machine had failed")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    accelerator = Accelerator(
        project_config=ProjectConfiguration(
            project_dir=str(args.project_dir), automatic_checkpoint_naming=True, total_limit=2
        )
    )
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(digits, args.batch_size, shuffle=True))
    scheduler = accelerator.prepare_scheduler(scheduler, per="update")
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        accelerator.load_state()  # weights, optimizer, schedule, random numbers, the loader's place, and progress
        accelerator.print(f"resumed at epoch {progress.epoch + 1}, update {progress.update}")

    for epoch in range(progress.epoch, args.epochs):
        progress.epoch = epoch
        for x, y in loader:  # after a resume, only what is left of the epoch
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.update += 1
            if progress.update % args.save_every == 0:
                accelerator.save_state()
            if progress.update == args.stop_after:
                accelerator.print(f"left at update {progress.update}")
                accelerator.end_training()
                return
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    accelerator.print(f"weights {digest(accelerator.unwrap_model(model))} after {progress.update} updates")
    accelerator.end_training()


if __name__ == "__main__":
    main()
