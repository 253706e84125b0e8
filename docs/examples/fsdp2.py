"""FSDP2: parameters, gradients and optimizer state cut into one part per rank; each rank trains on data of its own.

    accel launch --cpu --num-processes 2 docs/examples/fsdp2.py

Without `fsdp_plugin` in the script, `accel launch --use-fsdp --fsdp-version 2` asks for the same. The net guesses the
next character of Python's own help from the sixteen before.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, set_seed
from accel_parallel import FullyShardedDataParallelPlugin

CONTEXT, WIDTH = 16, 64


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
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/fsdp2"), help="gets the weights, whole")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    accelerator = Accelerator(fsdp_plugin=plugin)
    set_seed(0)
    model = CharacterModel(args.layers)
    whole = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)  # follows the model when both are prepared together
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(text(), args.batch_size, shuffle=True, drop_last=True)
    )
    mine = sum(parameter.to_local().numel() for parameter in model.parameters())
    print(f"rank {accelerator.process_index} holds {mine} of {whole} parameters", flush=True)

    for update, (x, y) in zip(range(args.updates), loader, strict=False):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)  # by the norm over all parts
        optimizer.step()
        optimizer.zero_grad()
        if update % 20 == 0 or update == args.updates - 1:
            mean = accelerator.reduce(loss.detach(), "mean").item()
            accelerator.print(f"update {update + 1}: loss {mean:.3f}")
    state = accelerator.get_state_dict(model)  # every rank calls it; the first one gets the whole model
    accelerator.save(state, args.output_dir / "model.safetensors", safe_serialization=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
