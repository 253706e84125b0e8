"""LocalSGD: each rank trains on its own for some updates, then all take the mean of their weights.

    accel launch --cpu --num-processes 2 docs/examples/local_sgd.py --local-sgd-steps 8

An eighth of the messages of ordinary data parallelism; what it costs in accuracy depends on the problem.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accel import Accelerator, set_seed
from accel_parallel import LocalSGD


def spread(accelerator: Accelerator, model: nn.Module) -> float:
    """How far the ranks' weights lie apart: the largest difference of any of them."""
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    of_all = accelerator.gather(weights[None])
    return (of_all.amax(0) - of_all.amin(0)).max().item()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--local-sgd-steps", type=int, default=8, help="updates between two means")
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    accelerator = Accelerator()
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_set, test_set = random_split(digits, [0.8, 0.2])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train_set, args.batch_size, shuffle=True), DataLoader(test_set, 128)
    )

    widest = 0.0
    with LocalSGD(accelerator, model, args.local_sgd_steps) as local:
        for _ in range(args.epochs):
            for x, y in train_loader:
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                widest = max(widest, spread(accelerator, model))
                local.step()
    with torch.no_grad():
        right = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in test_loader]
    accelerator.print(f"weights lay {widest:.1e} apart between the means, {spread(accelerator, model):.1e} at the end")
    accelerator.print(f"accuracy {torch.cat(right).float().mean():.2%}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
