"""Gradient accumulation: an update from several micro-batches, where one large batch would not fit.

    accel launch --cpu --num-processes 2 docs/examples/gradient_accumulation.py
    accel launch --cpu --num-processes 2 docs/examples/gradient_accumulation.py --batch-size 64 --steps 1

Both train the same net: 4 micro-batches of 16 make the update that one batch of 64 makes. Where micro-batches hold
unequal numbers of items, see exact_accumulation.py.
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
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16, help="of a micro-batch, per process")
    parser.add_argument("--steps", type=int, default=4, help="micro-batches per update")
    parser.add_argument("--lr", type=float, default=0.5)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    accelerator = Accelerator(gradient_accumulation_steps=args.steps)
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_set, _ = random_split(digits, [1408, 389])  # 11 updates of 128 samples on two processes
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(train_set, args.batch_size, shuffle=True)
    )

    updates = 0
    for epoch in range(args.epochs):
        losses = []
        for x, y in loader:
            with accelerator.accumulate(model):  # inside a window, ranks do not talk, and step and zero_grad wait
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)  # divided by the micro-batches per update
                optimizer.step()
                optimizer.zero_grad()
            updates += accelerator.sync_gradients
            losses.append(loss.detach())
        mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
        accelerator.print(f"epoch {epoch + 1}: {updates} updates, loss {mean:.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
