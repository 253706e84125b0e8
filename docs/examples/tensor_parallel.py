"""Tensor parallelism: each matrix is cut over the ranks, which work on the same batch.

    accel launch --cpu --num-processes 2 docs/examples/tensor_parallel.py

The plan says how layers are cut. A "colwise" layer makes a part of its outputs on each rank, a "rowwise" one takes them
as its inputs and adds the results up: one message for both in forward, one in backward. On one process the same script
trains the uncut net, to the same losses.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, PartialState, set_seed
from accel_parallel import ParallelismConfig, TorchTensorParallelConfig

CONTEXT, WIDTH = 16, 64
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class CharacterModel(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH // 4)
        self.enter = nn.Linear(CONTEXT * WIDTH // 4, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(layers))
        self.logits = nn.Linear(WIDTH, 128)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.enter(self.embedding(characters).flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.logits(x)


def text() -> TensorDataset:
    """Sixteen characters and the one that follows, from the longest of Python's help topics."""
    characters = torch.tensor(list(max(topics.values(), key=len).encode("ascii", "replace")))
    windows = characters.unfold(0, CONTEXT + 1, 1)
    return TensorDataset(windows[:, :-1], windows[:, -1])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="the same batch on all ranks of a tp group")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    ranks = PartialState().num_processes
    config = ParallelismConfig(tp_size=ranks, tp_handler=TorchTensorParallelConfig(plan=PLAN))
    accelerator = Accelerator(parallelism_config=config)
    set_seed(0)
    model = CharacterModel(args.layers)
    whole = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(text(), args.batch_size, shuffle=True, drop_last=True)
    )
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    print(
        f"rank {accelerator.process_index} holds {sum(part.numel() for part in parts)} of {whole} parameters",
        flush=True,
    )

    for update, (x, y) in zip(range(args.updates), loader, strict=False):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if update % 20 == 0 or update == args.updates - 1:
            accelerator.print(f"update {update + 1}: loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
