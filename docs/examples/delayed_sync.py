"""Delayed reduction: several forward passes first, then their backward passes; gradients travel with the last alone.

    accel launch --cpu --num-processes 2 docs/examples/delayed_sync.py

As in reinforcement learning, where a whole episode is played before its losses are known. The forward passes run under
`no_sync`, and `trigger_sync_in_backward` makes the last backward pass reduce what all of them left. The script shows
that the gradients are those of the sum of all losses, reduced at once.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from accel import Accelerator, set_seed


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="of an episode")
    parser.add_argument("--width", type=int, default=16)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    accelerator = Accelerator()
    set_seed(0)
    model = nn.Sequential(nn.Linear(args.width, args.width), nn.Tanh(), nn.Linear(args.width, args.width))
    model = accelerator.prepare(model)
    set_seed(0, device_specific=True)  # every rank plays an episode of its own
    start = torch.randn(8, args.width, device=accelerator.device)

    state, losses = start, []
    with accelerator.no_sync(model):
        for _ in range(args.steps):  # an episode: each state follows from the one before
            state = model(state.detach())
            losses.append(state.square().mean())
    *early, last = losses
    for loss in early:
        accelerator.backward(loss)  # gradients stay on this rank
    mine = accelerator.gather(gradient(model)[None])
    accelerator.print(f"before the last backward pass, ranks differ by {(mine[0] - mine[-1]).abs().max():.1e}")
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(last)  # now all that was gathered is averaged over the ranks
    delayed = gradient(model).clone()
    of_all = accelerator.gather(delayed[None])
    accelerator.print(f"after it, they differ by {(of_all[0] - of_all[-1]).abs().max():.1e}")

    bare = accelerator.unwrap_model(model)
    bare.zero_grad()
    state, total = start, 0.0
    for _ in range(args.steps):  # the same by plain torch
        state = bare(state.detach())
        total = total + state.square().mean()
    total.backward()
    wanted = accelerator.reduce(gradient(bare), "mean")
    accelerator.print(f"and from the gradients of the sum by {(delayed - wanted).abs().max() / wanted.abs().max():.1e}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
