"""One measurement of bench_parallel, on each of two gloo ranks: DDP and `fully_shard` by a library, and in raw torch.

Started by torch's launcher with either environment's Python; rank 0 prints one JSON object. Nothing is imported but
torch and the library. The peer leaves FSDP out on CPUs, without a word; here its state is told that it has it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

MAX_STEPS, WARM_UP_STEPS, MEASURED_S = 1500, 20, 15.0
PREPARED_PAIRS = 5


class Block(nn.Module):
    """Three modules, one of which has parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(width, width), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """The activated output."""
        activated: Tensor = self.activation(self.linear(x))
        return activated


def chain(blocks: int, width: int) -> nn.Sequential:
    """So many blocks, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """With momentum, so that there is state."""
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def raw_prepare(kind: str) -> Callable[[nn.Module], tuple[nn.Module, Any]]:
    """As one writes it in torch alone, where the optimizer is made last."""

    def prepare(model: nn.Module) -> tuple[nn.Module, Any]:
        if kind == "ddp":
            return DistributedDataParallel(model), sgd(model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in (*model.children(), model):
            fully_shard(unit, mesh=mesh)
        return model, sgd(model)

    return prepare


def prepare_by(accelerator: Any) -> Callable[[nn.Module], tuple[nn.Module, Any]]:
    """As scripts have it: the optimizer is made before, and follows."""

    def prepare(model: nn.Module) -> tuple[nn.Module, Any]:
        prepared: tuple[nn.Module, Any] = accelerator.prepare(model, sgd(model))
        return prepared

    return prepare


def accelerator_of(library: str, kind: str, **options: Any) -> Any:
    """The library's object for this kind of training."""
    module: Any = importlib.import_module(library)
    if kind == "ddp":
        return module.Accelerator(cpu=True)
    utils: Any = importlib.import_module(f"{library}.utils")
    plugin = utils.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=["Block"],
        **options,
    )
    if library != "accelerate":
        return module.Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator = module.Accelerator(cpu=True)
    shared: dict[str, Any] = importlib.import_module("accelerate.state").AcceleratorState._shared_state  # noqa: SLF001
    shared.update(fsdp_plugin=plugin, distributed_type=utils.DistributedType.FSDP)
    return accelerator


# ---------------------------------------------------------------- figures


def step_of(model: nn.Module, optimizer: Any, backward: Callable[[Tensor], None]) -> Callable[[], None]:
    """A training step on a batch of its own."""
    inputs = torch.randn(4, 64)

    def step() -> None:
        backward(model(inputs).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_step(library: str, kind: str, _checkpoint: str) -> dict[str, float]:
    """Raw and prepared steps in turn; ranks wait for each other in both. Times in microseconds."""
    accelerator = accelerator_of(library, kind)
    raw = step_of(*raw_prepare(kind)(chain(4, 64)), lambda loss: loss.backward())
    prepared = step_of(*prepare_by(accelerator)(chain(4, 64)), accelerator.backward)

    def time_us(step: Callable[[], None]) -> float:
        start = time.perf_counter_ns()
        step()
        return (time.perf_counter_ns() - start) / 1000

    start = time.perf_counter()
    for _ in range(WARM_UP_STEPS):
        raw()
        prepared()
    pair_s = (time.perf_counter() - start) / WARM_UP_STEPS
    count = torch.tensor(max(WARM_UP_STEPS, min(MAX_STEPS, int(MEASURED_S / pair_s))))
    dist.broadcast(count, src=0)
    pairs = []
    for number in range(int(count)):  # who begins changes, as the first step of a pair may find other caches
        first, second = (raw, prepared) if number % 2 else (prepared, raw)
        times = time_us(first), time_us(second)
        pairs.append(times if number % 2 else times[::-1])
    return {
        "raw_us": statistics.median(bare for bare, _ in pairs),
        "added_us": statistics.median(ours - bare for bare, ours in pairs),
    }


def measure_memory(library: str, kind: str, _checkpoint: str) -> dict[str, float]:
    """The most bytes of tensors at once, on this rank, while 50 MB of parameters are made, prepared and trained.

    Counted by torch's allocator: what the system gives a process differs by a tenth from run to run. The least of three
    runs, since how many gathered units wait at once is a matter of which thread is faster.
    """
    accelerator = None if library == "torch" else accelerator_of(library, kind)
    prepare = raw_prepare(kind) if accelerator is None else prepare_by(accelerator)

    def train() -> None:
        model, optimizer = prepare(chain(12, 1024))
        inputs = torch.randn(4, 1024)
        for _ in range(3):
            loss = model(inputs).pow(2).mean()
            _ = loss.backward() if accelerator is None else accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    peaks = []
    for _ in range(3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
            train()
        recorded: Any = profiled.profiler
        events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        peaks.append(max(itertools.accumulate(changes)))
        gc.collect()
    return {"peak_bytes": min(peaks)}


def measure_prepare(library: str, kind: str, _checkpoint: str) -> dict[str, float]:
    """Seconds to share a model of 1,000 modules and its optimizer over ranks, in raw torch and by the library in turn.

    The optimizer's making is part of both.
    """
    raw_s: list[float] = []
    prepare_s: list[float] = []
    for _ in range(PREPARED_PAIRS + 1):
        accelerator = accelerator_of(library, kind)
        for found, prepare in ((raw_s, raw_prepare(kind)), (prepare_s, prepare_by(accelerator))):
            model = chain(333, 8)
            gc.collect()
            dist.barrier()
            start = time.perf_counter()
            shared, _ = prepare(model)
            found.append(time.perf_counter() - start)
            assert sum(isinstance(module, FSDPModule) for module in shared.modules()) == 334
    pairs = list(zip(raw_s, prepare_s, strict=True))[1:]  # the first ones import and fill caches
    return {
        "prepare_s": statistics.median(prepare_s[1:]),
        "prepare_over_raw": statistics.median(mine / raw for raw, mine in pairs),
    }


def measure_load(library: str, kind: str, checkpoint: str) -> dict[str, float]:
    """By how much memory of both ranks grows at most, over the checkpoint's size, while rank 0 alone reads it."""
    from safetensors.torch import load_file

    from bench.measured_ckpt import peak_of

    accelerator = accelerator_of(library, kind, cpu_ram_efficient_loading=True)

    def load() -> None:
        with torch.device("meta"):
            model = chain(*LOADED)
        if dist.get_rank() == 0:
            model.to_empty(device="cpu")
            model.load_state_dict(load_file(checkpoint))
        accelerator.prepare(model)

    def all_together() -> None:
        dist.barrier()
        load()
        dist.barrier()

    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank():
        all_together()
        return {}
    return {"peak_over_size": peak_of(all_together, pids)[1] / Path(checkpoint).stat().st_size}


LOADED = (16, 4096)  # blocks and width of the model that is loaded: 1.07 GB
FIGURES = {"step": measure_step, "memory": measure_memory, "prepare": measure_prepare, "load": measure_load}


def main() -> None:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True, choices=["accel", "accelerate", "torch"])
    parser.add_argument("--figure", required=True, choices=FIGURES)
    parser.add_argument("--kind", required=True, choices=["ddp", "fsdp2"])
    parser.add_argument("--checkpoint", default="", help="a file of safetensors with the weights that are loaded")
    parser.add_argument("--write", action="store_true", help="write that file and do nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.write:
        from safetensors.torch import save_file

        save_file(chain(*LOADED).state_dict(), options.checkpoint)
        return
    if options.library == "torch":
        dist.init_process_group("gloo")
    figures = FIGURES[options.figure](options.library, options.kind, options.checkpoint)
    if dist.get_rank() == 0:
        print(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
