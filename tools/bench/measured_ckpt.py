"""One measurement of bench_ckpt: saving and loading 400 MB of model and AdamW state with one library.

Prints one JSON object: seconds per figure, and bytes for the peak of memory. Nothing is imported but torch and the
library, so it runs in either environment.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

LAYERS = 8  # of 2048 x 2048: 134 MB, and twice that for AdamW


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that has made a step."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def seconds(action: Callable[[], Any]) -> float:
    """How long an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


@contextlib.contextmanager
def without_flushes() -> Iterator[None]:
    """A block in which `os.fsync` does nothing: what a library costs apart from the disk's own time."""
    original = os.fsync
    os.fsync = lambda _fd: None  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = original


def resident_bytes(pids: Sequence[int | str]) -> int:
    """Memory of these processes that no file backs: pages of mapped files are the system's to take back."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def peak_of(action: Callable[[], Any], pids: Sequence[int | str] = ("self",)) -> tuple[float, int]:
    """Seconds of an action, and by how many bytes memory grew at most, of all processes together; sampled every 2 ms.

    Args:
        pids: of the processes, which have to live until the action ends.
    """
    before, peak, ended = resident_bytes(pids), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, resident_bytes(pids) - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        return seconds(action), peak
    finally:
        ended.set()
        thread.join()


def measure(library: str, folder: Path) -> dict[str, float]:
    """All figures of a library."""
    module = importlib.import_module(library)
    accelerator = module.Accelerator(cpu=True)
    model, optimizer = build()
    prepared = accelerator.prepare(model, optimizer)
    figures: dict[str, float] = {}
    new = iter(range(1000))

    def path() -> Path:
        """A new place, on a disk with nothing left to write: what one save leaves behind slows the next one down."""
        shutil.rmtree(folder)
        folder.mkdir()
        os.sync()
        return folder / f"{next(new)}"

    accelerator.save_state(str(path()))  # the first one imports and touches everything
    with without_flushes():
        target = path()
        figures["save_state_no_fsync"] = seconds(lambda: accelerator.save_state(str(target)))
        target = path()
        figures["torch_save"] = seconds(lambda: torch.save([model.state_dict(), optimizer.state_dict()], target))
        target = path()
        figures["save_model"] = seconds(lambda: accelerator.save_model(prepared[0], str(target)))
        target = path()
        figures["bytes"] = seconds(lambda: write_bytes(model, target))
    last = path()
    figures["save_state"] = seconds(lambda: accelerator.save_state(str(last)))
    figures["load_state"], figures["load_peak"] = peak_of(lambda: accelerator.load_state(str(last)))
    if library == "accel":
        for name in ("async_first", "async_second"):
            target = path()
            start = time.perf_counter()
            handle = accelerator.save_state(str(target), blocking=False)
            figures[name] = time.perf_counter() - start
            handle.wait()
    return figures


def write_bytes(model: nn.Module, path: Path) -> None:
    """The model's weights as they lie in memory, by plain writes."""
    with path.open("wb", buffering=0) as file:
        for tensor in model.state_dict().values():
            file.write(tensor.numpy().data)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", required=True, choices=["accel", "accelerate"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="bench-ckpt-"))
    try:
        print(json.dumps(measure(options.library, folder)))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
