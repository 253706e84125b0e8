"""Cross-validation: a net per fold, each with an Accelerator that has let go of the one before; then all of them vote.

    accel launch --cpu --num-processes 2 docs/examples/cross_validation.py

The samples that a fold holds out are read in parts by all ranks, and come back whole and in order on each.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from accel import Accelerator, set_seed


def train(accelerator: Accelerator, train_set: Subset, args: argparse.Namespace) -> nn.Module:
    """A net trained on one fold's part."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(train_set, args.batch_size, shuffle=True)
    )
    for _ in range(args.epochs):
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return model


@torch.no_grad()
def predict(accelerator: Accelerator, model: nn.Module, data: Subset) -> tuple[Tensor, Tensor]:
    """Logits and labels of all samples, in their order, on every rank."""
    loader = accelerator.prepare(DataLoader(data, 128))
    seen = [accelerator.gather_for_metrics((model(x), y)) for x, y in loader]
    logits, labels = (torch.cat(parts) for parts in zip(*seen, strict=True))
    return logits, labels


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    accelerator = Accelerator()
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    test_set = Subset(digits, range(1437, 1797))  # of other writers than the rest
    votes, accuracies = [], []
    folds = StratifiedKFold(args.folds, shuffle=True, random_state=0).split(images[:1437], labels[:1437])
    for number, (train_part, held_out) in enumerate(folds, start=1):
        set_seed(number)
        model = train(accelerator, Subset(digits, train_part.tolist()), args)
        logits, wanted = predict(accelerator, model, Subset(digits, held_out.tolist()))
        accelerator.print(f"fold {number}: {(logits.argmax(1) == wanted).float().mean():.2%} of {len(wanted)} held out")
        logits, wanted = predict(accelerator, model, test_set)
        votes.append(logits.softmax(1))
        accuracies.append((logits.argmax(1) == wanted).float().mean())
        del model
        accelerator.free_memory()  # the next fold begins with nothing prepared
    together = (torch.stack(votes).mean(0).argmax(1) == wanted).float().mean()
    accelerator.print(f"test: {torch.stack(accuracies).mean():.2%} by one net on average, {together:.2%} by all")
    accelerator.end_training()


if __name__ == "__main__":
    main()
