"""One measurement of bench_collectives, on each of two ranks: a library's calls and the raw torch calls beside them.

Started by torch's launcher with either environment's Python; rank 0 prints one JSON object: row to
microseconds, and row to how many times as long as raw torch it takes. Blocks
of raw and of library calls alternate and medians over blocks are taken, so that what else the machine does hits both.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

BLOCKS = 60
Call = Callable[[], object]

SMALL = torch.randn(8)
MANY = {f"key{index}": torch.randn(8, 4) for index in range(32)}
LEAVES = [{"x": torch.ones(4), "y": [torch.ones(2), torch.ones(1), torch.ones(3)]} for _ in range(25)]  # 100 tensors
SQUARE = torch.randn(256, 256)
OBJECT = {"loss": 0.5, "name": "a batch", "ids": list(range(20))}


def raw_gather() -> torch.Tensor:
    """What a user of torch alone writes, without a check."""
    everyone = [torch.empty_like(SMALL) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, SMALL)
    return torch.cat(everyone)


def raw_reduce() -> torch.Tensor:
    """Likewise; the input is kept."""
    total = SMALL.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def raw_gather_object() -> list[Any]:
    """Likewise."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [OBJECT])
    return everyone


def update() -> torch.Tensor:
    """About a millisecond of work, and the exchange of gradients after which ranks are equally far."""
    gradient = (SQUARE @ SQUARE)[0]
    dist.all_reduce(gradient)
    return gradient


def calls(library: str) -> dict[str, tuple[Call | None, Call, int]]:
    """Row to raw call, library's call and calls per block."""
    state: Any = importlib.import_module(library).PartialState(cpu=True)
    utils: Any = importlib.import_module(f"{library}.utils" if library == "accelerate" else "accel_state")
    items = list(range(1000))

    def split() -> object:
        with state.split_between_processes(items) as part:
            return part

    rows: dict[str, tuple[Call | None, Call, int]] = {
        "gather": (raw_gather, lambda: utils.gather(SMALL), 12),
        "gather dict": (None, lambda: utils.gather(MANY), 4),
        "reduce": (raw_reduce, lambda: utils.reduce(SMALL), 12),
        "gather_object": (raw_gather_object, lambda: utils.gather_object([OBJECT]), 8),
        "split": (None, split, 200),
        "send_to_device": (None, lambda: utils.send_to_device(LEAVES, "cpu"), 12),
    }
    if library != "accelerate":
        notice = utils.StopNotice()

        def update_and_ask() -> object:
            update()
            return notice.check()

        rows["should_stop"] = (update, update_and_ask, 12)
        rows["gather uniform"] = (raw_gather, lambda: utils.gather(SMALL, uniform=True), 12)
    return rows


def block_us(call: Call, count: int) -> float:
    """How long one call of a block takes."""
    call()
    start = time.perf_counter_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - start) / 1000 / count


def main() -> None:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True, choices=["accel_state", "accelerate"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    for name, (raw, call, count) in calls(options.library).items():
        for _ in range(BLOCKS):
            if raw is not None:
                found.setdefault(f"raw {name}", []).append(block_us(raw, count))
            found.setdefault(name, []).append(block_us(call, count))
    if dist.get_rank() == 0:
        figures = {name: statistics.median(times) for name, times in found.items()}
        for name, times in found.items():
            if f"raw {name}" in found:  # block by block: two that follow each other saw the same machine
                ratios = [mine / raw for mine, raw in zip(times, found[f"raw {name}"], strict=True)]
                figures[f"{name} over raw"] = statistics.median(ratios)
        print(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
