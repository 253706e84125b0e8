"""Learning-rate finder: raise the rate from tiny to huge in one short run, and take that at which loss falls fastest.

    accel launch --cpu --num-processes 2 docs/examples/lr_finder.py

The method is Smith's ("Cyclical Learning Rates for Training Neural Networks", WACV 2017). Every rank sees the mean loss
of all, so that all of them stop at the same step and suggest the same rate.
"""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, set_seed


def steps(accelerator: Accelerator, lr: float, batch_size: int):
    """Train a fresh net without end; yields the optimizer, whose rate may be changed, and each step's mean loss."""
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(digits, batch_size, shuffle=True))
    for x, y in itertools.chain.from_iterable(itertools.repeat(loader)):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        yield optimizer, accelerator.reduce(loss.detach(), "mean").item()


def find_rate(accelerator: Accelerator, args: argparse.Namespace) -> float:
    """The rate at which the smoothed loss falls fastest per doubling of the rate."""
    factor = (args.highest / args.lowest) ** (1 / args.steps)
    smooth, rates, curve = None, [], []
    for optimizer, loss in steps(accelerator, args.lowest, args.batch_size):
        rate = optimizer.param_groups[0]["lr"]
        smooth = loss if smooth is None else 0.8 * smooth + 0.2 * loss
        rates.append(rate)
        curve.append(smooth)
        if rate > args.highest or smooth > 2 * min(curve):  # from here on it only diverges
            break
        optimizer.param_groups[0]["lr"] = rate * factor
    falls = [after - before for before, after in itertools.pairwise(curve)]
    return rates[falls.index(min(falls))]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lowest", type=float, default=1e-5)
    parser.add_argument("--highest", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=80, help="from the lowest to the highest rate")
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--train-steps", type=int, default=60, help="with the rate that was found, and others")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    accelerator = Accelerator()
    found = find_rate(accelerator, args)
    accelerator.print(f"suggested rate {found:.2e}")
    for rate in (found, found / 100, found * 100):
        accelerator.free_memory()  # let go of the net before
        run = itertools.islice(steps(accelerator, rate, args.batch_size), args.train_steps)
        losses = [loss for _, loss in run]
        accelerator.print(f"rate {rate:.2e}: loss {sum(losses[-10:]) / 10:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
