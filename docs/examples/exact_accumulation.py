"""Exact accumulation: losses weighted by their tokens, however the text was cut into micro-batches and ranks.

    accel launch --cpu --num-processes 2 docs/examples/exact_accumulation.py

`backward(mean)` gives every micro-batch the same weight, so a token among few counts more than one among many.
`backward(loss_sum, num_items=tokens)` gives every token the same weight: the gradients are those of one big batch. The
script compares both with that batch, and then trains. Its net guesses the next character of Python's own help.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from accel import Accelerator, set_seed
from accel_data import weighted_mean

IGNORED = -100  # cross_entropy's mark for what does not count


def lines(number: int) -> list[Tensor]:
    """Lines of text as tensors of characters, from a few to eighty of them."""
    text = "\n".join(topics.values()).encode("ascii", "replace").decode().split("\n")
    return [torch.tensor(list(line.encode())) for line in text if len(line) > 1][:number]


def collate(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Characters and the ones that follow, filled up to the longest line."""
    inputs = pad_sequence([line[:-1] for line in batch], batch_first=True)
    targets = pad_sequence([line[1:] for line in batch], batch_first=True, padding_value=IGNORED)
    return inputs, targets


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], reduction: str) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction=reduction)


def window_gradient(accelerator: Accelerator, model: nn.Module, batches: list, exact: bool) -> Tensor:
    """The gradients that a window of micro-batches leaves."""
    for batch in batches:
        with accelerator.accumulate(model):
            if exact:
                num_tokens = (batch[1] != IGNORED).sum()
                accelerator.backward(loss_of(model, batch, "sum"), num_items=num_tokens)
            else:
                accelerator.backward(loss_of(model, batch, "mean"))
    return take_gradient(model)


def take_gradient(model: nn.Module) -> Tensor:
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return gradient


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--steps", type=int, default=4, help="micro-batches per update")
    parser.add_argument("--batch-size", type=int, default=4, help="lines in a micro-batch, per process")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    accelerator = Accelerator(gradient_accumulation_steps=args.steps)
    set_seed(0)
    per_update = args.batch_size * args.steps * accelerator.num_processes
    data = lines(args.updates * per_update)
    bare = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 128))
    optimizer = torch.optim.AdamW(bare.parameters(), 0.02)
    model, optimizer, loader = accelerator.prepare(
        bare, optimizer, DataLoader(data, args.batch_size, collate_fn=collate)
    )

    bare = accelerator.unwrap_model(model)
    whole_batch = tuple(tensor.to(accelerator.device) for tensor in collate(data[:per_update]))
    loss_of(bare, whole_batch, "mean").backward()  # all lines of the first update at once, without accel
    wanted = take_gradient(bare)
    first = [batch for _, batch in zip(range(args.steps), loader, strict=False)]
    for name, exact in (("mean of means", False), ("num_items", True)):
        difference = (window_gradient(accelerator, model, first, exact) - wanted).norm() / wanted.norm()
        accelerator.print(f"{name}: gradients differ from one big batch by {difference:.1e}")

    for number, batch in enumerate(loader, start=1):
        with accelerator.accumulate(model):
            num_tokens = (batch[1] != IGNORED).sum()
            loss_sum = loss_of(model, batch, "sum")
            accelerator.backward(loss_sum, num_items=num_tokens)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and number // args.steps in (1, args.updates):
            mean = weighted_mean(loss_sum.detach() / num_tokens, num_tokens).item()
            accelerator.print(f"update {number // args.steps}: loss per token {mean:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
