"""One measurement of bench_data, with one of the libraries. Prints one number.

``overhead``: what a prepared loader adds per batch to a bare DataLoader of trivial batches, in µs; read in turn.
``cut``: reading the indices of one of WORLD ranks, in µs per own batch; the order ``permutation`` is ours alone.
``skip``: from ``skip_first_batches`` of N batches to the first batch, in ms.
``resume``: from loading the state after N batches to the first batch, in ms.
``block``, ``single``, ``trillion``: a `SampleOrder`, in µs per index of a block of 8,192, µs of a single index, and ms
to the first batch of 10^12 shuffled samples.
``bytes``: what a dispatched part is sent as, over the bytes of its tensors.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

BATCH_SIZE = 4
OWN_BATCHES = 200


class Numbers(Dataset[int]):
    """As long as asked for, without holding anything."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self.length


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes, once."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def exhaust(items: Iterable[Any]) -> None:
    """Read to the end."""
    for _ in items:
        continue


def prepared_with(library: str, bare: DataLoader[Any]) -> Any:
    """A loader of the library over the same data set and batches."""
    if library == "torchdata":
        module = importlib.import_module("torchdata.stateful_dataloader")
        return module.StatefulDataLoader(bare.dataset, batch_size=bare.batch_size)
    return importlib.import_module(library).Accelerator(cpu=True).prepare(bare)


def overhead_us(library: str) -> float:
    """Per batch, over a bare loader."""
    num_batches = 2000
    bare = DataLoader(Numbers(num_batches * BATCH_SIZE), batch_size=BATCH_SIZE)
    prepared = prepared_with(library, bare)
    pairs = [(seconds_of(lambda: exhaust(bare)), seconds_of(lambda: exhaust(prepared))) for _ in range(80)]
    bare_s, prepared_s = (min(times) for times in zip(*pairs, strict=True))  # the least disturbed epochs
    return float(prepared_s - bare_s) / num_batches * 1e6


def cut_us(library: str, world: int, order: str) -> float:
    """Per own batch of indices of a rank in the middle."""
    data = Numbers(OWN_BATCHES * BATCH_SIZE * world)
    module = importlib.import_module("accel_data" if library == "accel" else "accelerate.data_loader")
    sampler: Any = SequentialSampler(data) if order == "sequential" else module.PermutationSampler(data, seed=1)
    shard = module.BatchSamplerShard(BatchSampler(sampler, BATCH_SIZE, drop_last=False), world, world // 2)
    times = [seconds_of(lambda: exhaust(shard)) for _ in range(3 if library == "accelerate" and world > 64 else 1000)]
    return min(times) / OWN_BATCHES * 1e6  # the least disturbed


def skip_ms(library: str, num_batches: int, order: str) -> float:
    """To the first batch after those that are skipped."""
    data = Numbers(BATCH_SIZE * 2_500_000)
    module = importlib.import_module(library)
    sampler = importlib.import_module("accel_data").PermutationSampler(data, 1) if order == "permutation" else None
    loader = module.Accelerator(cpu=True).prepare(DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler))
    skip = module.skip_first_batches

    def first_batch() -> None:
        batch = next(iter(skip(loader, num_batches)))
        assert order == "permutation" or batch[0] == num_batches * BATCH_SIZE

    return min(seconds_of(first_batch) for _ in range(1 if library == "accelerate" else 200)) * 1e3


def resume_ms(library: str, num_batches: int) -> float:
    """To the first batch after those that a state counts."""
    loader = prepared_with(library, DataLoader(Numbers(BATCH_SIZE * 2_500_000), batch_size=BATCH_SIZE))
    reading = iter(loader)
    exhaust(islice(reading, num_batches))
    state = loader.state_dict()

    def first_batch() -> None:
        loader.load_state_dict(state)
        assert next(iter(loader))[0] == num_batches * BATCH_SIZE

    return statistics.median(seconds_of(first_batch) for _ in range(20)) * 1e3


def order_figure(kind: str) -> float:
    """Of a `SampleOrder`."""
    accel_data = importlib.import_module("accel_data")
    order = accel_data.SampleOrder(10**12, seed=1)
    if kind == "block":
        blocks = range(0, 100 * 8192, 8192)
        return (
            statistics.median(seconds_of(partial(order.__getitem__, slice(at, at + 8192))) for at in blocks)
            / 8192
            * 1e6
        )
    if kind == "single":
        rounds = [seconds_of(lambda: [order[i] for i in range(1000)]) for _ in range(20)]
        return statistics.median(rounds) / 1000 * 1e6
    data = Numbers(10**12)
    sampler = accel_data.PermutationSampler(data, seed=1)
    source = DataLoader(data, batch_size=32, sampler=sampler)
    loader = accel_data.prepare_data_loader(source, num_processes=8, process_index=3)
    return min(seconds_of(lambda: next(iter(loader))) for _ in range(200)) * 1e3


def bytes_ratio() -> float:
    """A message over the bytes of its tensors, for a part of 8 images."""
    wire = importlib.import_module("accel_data.wire")
    part = {"image": torch.rand(64, 3, 32, 32)[8:16], "label": torch.arange(64)[8:16]}
    return float(wire.encode(part).numel() / sum(tensor.nbytes for tensor in part.values()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["overhead", "cut", "skip", "resume", "block", "single", "trillion", "bytes"])
    parser.add_argument("--library", default="accel", choices=["accel", "accelerate", "torchdata"])
    parser.add_argument("--number", type=int, default=0, help="ranks of `cut`, batches of `skip` and `resume`")
    parser.add_argument("--order", default="sequential", choices=["sequential", "permutation"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.kind == "overhead":
        print(overhead_us(options.library))
    elif options.kind == "cut":
        print(cut_us(options.library, options.number, options.order))
    elif options.kind == "skip":
        print(skip_ms(options.library, options.number, options.order))
    elif options.kind == "resume":
        print(resume_ms(options.library, options.number))
    elif options.kind == "bytes":
        print(bytes_ratio())
    else:
        print(order_figure(options.kind))


if __name__ == "__main__":
    main()
