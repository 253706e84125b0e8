"""Pipeline parallelism: each rank has some of the layers, and parts of the batch pass through them one after the other.

    accel launch --cpu --num-processes 2 docs/examples/pipeline_parallel.py --schedule gpipe

`forward_backward` takes the place of the forward pass, the loss and `backward`; the loss is known where the last layers
are. On one process the same script trains the whole net, to the same losses.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, PartialState, set_seed
from accel_parallel import ParallelismConfig, PipelineConfig

CONTEXT, WIDTH = 16, 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def character_model(layers: int) -> nn.Sequential:
    """A chain of layers, which is cut between any two of them; other models say where: see `PipelineConfig`."""
    return nn.Sequential(
        nn.Embedding(128, WIDTH // 4),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH // 4, WIDTH),
        *(Block(WIDTH) for _ in range(layers)),
        nn.Linear(WIDTH, 128),
    )


def text() -> TensorDataset:
    """Sixteen characters and the one that follows, from the longest of Python's help topics."""
    characters = torch.tensor(list(max(topics.values(), key=len).encode("ascii", "replace")))
    windows = characters.unfold(0, CONTEXT + 1, 1)
    return TensorDataset(windows[:, :-1], windows[:, -1])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128, help="the same batch on all ranks of a pipeline")
    parser.add_argument("--micro-batches", type=int, default=4, help="that a batch is cut into")
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="1f1b")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    handler = PipelineConfig(schedule=args.schedule, num_microbatches=args.micro_batches)
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(pp_size=PartialState().num_processes, pp_handler=handler)
    )
    set_seed(0)
    model = character_model(args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(text(), args.batch_size, shuffle=True, drop_last=True)
    )
    names = sorted({name.split(".")[0] for name, _ in model.named_parameters()})
    print(f"rank {accelerator.process_index} has layers {', '.join(names)}", flush=True)

    for update, batch in zip(range(args.updates), loader, strict=False):  # a batch is (input, target)
        loss = accelerator.forward_backward(batch, F.cross_entropy)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)  # by the norm over all stages
        optimizer.step()
        optimizer.zero_grad()
        if loss is not None and (update % 20 == 0 or update == args.updates - 1):
            print(f"update {update + 1}: loss {loss.item():.4f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
