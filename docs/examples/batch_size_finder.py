"""Memory: begin with a batch that is too large, halve it until it fits, and keep the size of an update.

    python docs/examples/batch_size_finder.py --pretend-limit 100

On an accelerator, running out of memory raises an error that `find_executable_batch_size` knows; it frees what the
failed try held and calls the function anew, on all ranks. The main memory of a computer ends less politely, so without
an accelerator `--pretend-limit` makes larger batches fail the same way.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, find_executable_batch_size, set_seed


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256, help="samples per update and process")
    parser.add_argument("--pretend-limit", type=int, help="micro-batches above this size fail for want of memory")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    accelerator = Accelerator()
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))

    @find_executable_batch_size(starting_batch_size=args.batch_size)
    def train(micro_batch_size: int) -> float:
        accelerator.print(f"trying micro-batches of {micro_batch_size}")
        accelerator.free_memory()  # what the try before had prepared
        accelerator.gradient_accumulation_steps = args.batch_size // micro_batch_size
        set_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(digits, micro_batch_size, shuffle=True, drop_last=True)
        )
        for _ in range(args.epochs):
            for x, y in loader:
                with accelerator.accumulate(model):
                    if args.pretend_limit is not None and len(x) > args.pretend_limit:
                        raise torch.OutOfMemoryError(f"a batch of {len(x)} does not fit")
                    loss = F.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
        return accelerator.reduce(loss.detach(), "mean").item()

    loss = train()  # the decorator gives the batch size
    accelerator.print(f"{accelerator.gradient_accumulation_steps} micro-batches per update, loss {loss:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
