"""One measurement of bench_step: a bare torch step and the same step prepared by a library, in turn.

Both have a model, an optimizer and a batch of their own, equal in size. Each single step is timed and the medians are
compared, so that whatever else the machine does hits few of them and both alike. Prints one JSON object: the median of
the bare step and what the prepared one's median adds, in µs. Nothing is imported but torch and the library, so it runs
in either environment.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

STEPS = 5000
WARM_UP_STEPS = 200

Step = Callable[[], None]


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A net of 72 parameters: the step is all overhead."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=True)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4)


def bare_step(kind: str) -> Step:
    """The step as one writes it in torch alone."""
    model, optimizer = model_and_optimizer()
    inputs = torch.randn(4, 8)

    def step() -> None:
        autocast = torch.autocast("cpu", torch.bfloat16) if kind == "bf16" else contextlib.nullcontext()
        with autocast:
            loss = model(inputs).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def prepared_step(library: str, kind: str) -> Step:
    """The step as one writes it with the library."""
    accelerator_class: Any = importlib.import_module(library).Accelerator
    accelerator = accelerator_class(cpu=True, mixed_precision="bf16" if kind == "bf16" else None)
    model, optimizer = accelerator.prepare(*model_and_optimizer())
    inputs = torch.randn(4, 8)

    def plain() -> None:
        loss = model(inputs).float().pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def under_accumulate() -> None:
        with accelerator.accumulate(model):
            plain()

    return under_accumulate if kind == "accumulate" else plain


def time_us(step: Step) -> float:
    """How long one step takes."""
    start = time.perf_counter_ns()
    step()
    return (time.perf_counter_ns() - start) / 1000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True, choices=["accel", "accelerate"])
    parser.add_argument("--kind", required=True, choices=["plain", "accumulate", "bf16"])
    options = parser.parse_args()
    torch.set_num_threads(1)

    bare, prepared = bare_step(options.kind), prepared_step(options.library, options.kind)
    for step in (bare, prepared):
        for _ in range(WARM_UP_STEPS):
            step()
    pairs = [(time_us(bare), time_us(prepared)) for _ in range(STEPS)]
    bare_us, prepared_us = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(json.dumps({"bare_us": bare_us, "added_us": prepared_us - bare_us}))


if __name__ == "__main__":
    main()
