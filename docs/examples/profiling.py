"""Profiling: which operators take the time of a few steps, and a trace of every rank to look at.

    accel launch --cpu --num-processes 2 docs/examples/profiling.py

Prints the most expensive operators; `runs/profiling/profile_<rank>.json` opens in chrome://tracing or Perfetto.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, set_seed
from accel.utils import ProfileKwargs


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wait", type=int, default=2, help="steps that are not watched")
    parser.add_argument("--active", type=int, default=3, help="steps that are recorded")
    parser.add_argument("--trace-dir", type=Path, default=Path("runs/profiling"))
    parser.add_argument("--rows", type=int, default=8, help="of the printed table")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    options = ProfileKwargs(
        activities=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"],
        schedule_option={"wait": args.wait, "warmup": 1, "active": args.active, "repeat": 1},
        profile_memory=True,
        record_shapes=True,
        output_trace_dir=str(args.trace_dir),
    )
    accelerator = Accelerator(kwargs_handlers=[options])
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(digits, 64, shuffle=True))

    with accelerator.profile() as profiler:
        for _, (x, y) in zip(range(args.wait + 1 + args.active), loader, strict=False):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()  # a step of the schedule
    accelerator.print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=args.rows))
    accelerator.print(f"traces in {args.trace_dir}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
