"""Early stopping: one rank finds that it is enough, and all of them leave in the same step.

    accel launch --cpu --num-processes 2 docs/examples/early_stopping.py

Each rank watches the loss on a part of the validation set of its own. A rank that left its loop alone would let the
others wait for ever; `set_trigger` on one makes `check_trigger` true on all.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel import Accelerator, set_seed


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=100, help="at most")
    parser.add_argument("--patience", type=int, default=3, help="epochs without a better loss")
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    accelerator = Accelerator()
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_set, held_out = random_split(digits, [0.7, 0.3])
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, train_loader, held_out_loader = accelerator.prepare(
        model, optimizer, DataLoader(train_set, args.batch_size, shuffle=True), DataLoader(held_out, 128)
    )

    best, since = float("inf"), 0
    for epoch in range(args.epochs):
        for x, y in train_loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():  # of this rank alone
            mine = torch.stack([F.cross_entropy(model(x), y) for x, y in held_out_loader]).mean().item()
        best, since = (mine, 0) if mine < best else (best, since + 1)
        if since >= args.patience:
            print(f"rank {accelerator.process_index} has seen enough in epoch {epoch + 1}", flush=True)
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    print(f"rank {accelerator.process_index} stopped in epoch {epoch + 1} of {args.epochs}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
