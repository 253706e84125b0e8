"""Image classification: the shortest whole loop, unchanged on one process or many.

    python docs/examples/image_classification.py
    accel launch --cpu --num-processes 2 docs/examples/image_classification.py

The five lines that a plain torch loop does not have are marked with an arrow.
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
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--mixed-precision", choices=["no", "bf16", "fp16"], default=None)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    accelerator = Accelerator(mixed_precision=args.mixed_precision)  # <-
    set_seed(0)
    images, labels = load_digits(return_X_y=True)  # 1,797 images of 8 x 8 pixels
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_set, test_set = random_split(digits, [0.8, 0.2])
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, 4 * args.batch_size)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)

    model, optimizer, train_loader, test_loader = accelerator.prepare(  # <-
        model, optimizer, train_loader, test_loader
    )
    for epoch in range(args.epochs):
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)  # <-
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        right = []
        with torch.no_grad():
            for x, y in test_loader:
                right.append(accelerator.gather_for_metrics(model(x).argmax(dim=1) == y))  # <- each sample once
        right = torch.cat(right)
        accelerator.print(f"epoch {epoch + 1}: accuracy {right.float().mean():.2%} of {len(right)}")
    accelerator.end_training()  # <-


if __name__ == "__main__":
    main()
