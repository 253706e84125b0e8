"""One measurement of bench_big: a 1 GB model loaded and run from disk, and a plan for 10,000 modules, by one library.

Prints one JSON object: seconds per figure, and bytes for the peak of memory. Nothing is imported but torch, safetensors
and the library, so it runs in either environment.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

LAYERS = 64  # of 2048 x 2048 float32: 1.07 GB
ROWS = 1  # of the batch, as a model that writes a token at a time has: weights are what takes time


def net(layers: int = LAYERS) -> nn.Sequential:
    """The model, with numbers or without."""
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(layers)))


def write_checkpoint(folder: Path) -> None:
    """Its weights as one safetensors file."""
    folder.mkdir(parents=True)
    save_file(net().state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


def seconds(action: Callable[[], Any]) -> float:
    """How long an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def anonymous_bytes() -> int:
    """Memory of this process that no file backs: pages of mapped files are the system's to take back."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) * 1024


def peak_of(action: Callable[[], Any]) -> tuple[float, int]:
    """Seconds of an action, and by how many bytes its memory grew at most, sampled every 2 ms."""
    before, peak, ended = anonymous_bytes(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, anonymous_bytes() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        return seconds(action), max(peak, anonymous_bytes() - before)
    finally:
        ended.set()
        thread.join()


def read_bytes(path: Path) -> None:
    """All bytes of a file, into memory."""
    with path.open("rb", buffering=0) as file:
        file.readinto(bytearray(path.stat().st_size))


def touch(model: nn.Module) -> None:
    """Have every page of a model's weights in memory."""
    for parameter in model.parameters():
        parameter.detach().view(-1)[::1024].sum()


def measure(library: str, folder: Path, scratch: Path) -> dict[str, float]:
    """All figures of a library."""
    module = importlib.import_module(library)
    figures: dict[str, float] = {}
    checkpoint = folder / "model.safetensors"
    read_bytes(checkpoint)  # the file is in the system's cache from here on
    figures["read"] = seconds(lambda: read_bytes(checkpoint))

    load: Callable[..., nn.Module] = module.load_checkpoint_and_dispatch  # imported from here on
    model = empty(module)
    figures["load"], figures["load_peak"] = peak_of(lambda: load(model, str(folder), device_map={"": "cpu"}))
    model = net()
    _, figures["refill_peak"] = peak_of(lambda: load(model, str(folder)))
    model = empty(module)
    figures["load_and_read"] = seconds(lambda: touch(load(model, str(folder), device_map={"": "cpu"})))
    model = empty(module)
    places = {str(index): "cpu" if index == 0 else "disk" for index in range(LAYERS)}
    load(model, str(folder), device_map=places, offload_folder=str(scratch / "disk"))
    batch = torch.ones(ROWS, 2048)
    with torch.inference_mode():
        figures["first_forward"] = seconds(lambda: model(batch))
        figures["forward"] = min(seconds(lambda: model(batch)) for _ in range(3))
    figures["plan"] = seconds_of_plan(module)
    return figures


def empty(module: Any) -> nn.Module:
    """The model without numbers."""
    with module.init_empty_weights():
        return net()


class Block(nn.Module):
    """Eight modules."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.output, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def seconds_of_plan(module: Any) -> float:
    """Where 10,000 modules go: two accelerators, the CPU and the disk."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(10, 8), nn.ModuleList(Block() for _ in range(1250)), nn.Linear(8, 10))
    size = sum(parameter.nbytes for parameter in model.parameters())
    memory = {0: size // 3, 1: size // 3, "cpu": size // 6}
    return min(seconds(lambda: module.infer_auto_device_map(model, max_memory=memory)) for _ in range(3))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", required=True, choices=["accel", "accelerate"])
    parser.add_argument("--checkpoint", type=Path, required=True, help="where the model lies; made if it is not there")
    options = parser.parse_args()
    logging.disable()
    torch.set_num_threads(1)
    if not options.checkpoint.exists():
        write_checkpoint(options.checkpoint)
    with tempfile.TemporaryDirectory(prefix="bench-big-") as scratch:
        print(json.dumps(measure(options.library, options.checkpoint, Path(scratch))))


if __name__ == "__main__":
    main()
