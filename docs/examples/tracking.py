"""Tracking: metrics, pictures and tables, to any number of trackers at once.

    accel launch --cpu --num-processes 2 docs/examples/tracking.py
    tensorboard --logdir runs/tracking

`jsonl` needs nothing: a line of JSON per call. `--log-with wandb` and the others need their library, as in
`pip install "accel[wandb]"`. A tracker that fails or hangs is reported once and never stops the training.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel import Accelerator, set_seed


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--log-with", nargs="+", default=["jsonl", "tensorboard"], metavar="TRACKER")
    parser.add_argument("--project-dir", type=Path, default=Path("runs/tracking"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    accelerator = Accelerator(log_with=args.log_with, project_dir=args.project_dir)
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_set, test_set = random_split(digits, [0.8, 0.2])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train_set, args.batch_size, shuffle=True), DataLoader(test_set, 128)
    )
    accelerator.init_trackers("digits", config={"lr": args.lr, "batch_size": args.batch_size})

    update = 0
    for _ in range(args.epochs):
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            update += 1
            if update % 10 == 0:
                accelerator.log({"loss": loss}, step=update, reduce="mean")  # over the ranks, which all call it

        with torch.no_grad():
            seen = [accelerator.gather_for_metrics((x, y, model(x).argmax(1))) for x, y in test_loader]
        x, y, guess = (torch.cat(parts) for parts in zip(*seen, strict=True))
        wrong = (guess != y).nonzero().flatten()[:16]
        accelerator.log({"accuracy": (guess == y).float().mean()}, step=update)
        accelerator.log_images({"mistakes": x[wrong].view(-1, 1, 8, 8)}, step=update)
        rows = [[int(y[index]), int(guess[index])] for index in wrong]
        accelerator.log_table("mistakes", columns=["is", "seen as"], data=rows, step=update)
    accelerator.end_training()  # whatever is still on its way is written
    accelerator.print(f"{update} updates tracked in {args.project_dir}")


if __name__ == "__main__":
    main()
