"""What sharded loaders cost: per batch, with more ranks, after a skip, and shuffled without a stored order.

Each measurement is a process of its own (``measured_data.py``). Rows whose name says "over" compare ours with ours: the
cost has to stay flat. Rows that name torchdata have its `StatefulDataLoader` as the peer, on one process. Bounds:
overhead at most Accelerate's; flat within 20 %; a tenth of what others take after a skip.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.pairing import Measure, Row, arguments, compare, output_of, report

MEASURED = Path(__file__).parent / "measured_data.py"
FLAT = 1.2


def main() -> int:
    """Measure all rows; returns 1 when a bound is missed."""
    options = arguments(__doc__ or "", rounds=3)

    def measure(library: str, *words: object) -> Measure:
        python = options.ours if library == "accel" else options.peer
        return lambda: float(output_of([python, MEASURED, "--library", library, *map(str, words)]))

    def row(name: str, unit: str, *words: object, peer: Measure | None = None, **bounds: float) -> Row:
        return compare(name, unit, peer=peer, ours=measure("accel", *words), rounds=options.rounds, **bounds)

    def cut(world: int, order: str = "sequential") -> tuple[object, ...]:
        return "cut", "--number", world, "--order", order

    def skip(num_batches: int, order: str = "sequential") -> tuple[object, ...]:
        return "skip", "--number", num_batches, "--order", order

    def resume(num_batches: int) -> tuple[object, ...]:
        return "resume", "--number", num_batches

    few, many = 240_000, 2_400_000
    rows = [
        row("added to a batch of a bare loader", "µs", "overhead", peer=measure("accelerate", "overhead"), max_ratio=1),
        row("the same beside torchdata", "µs", "overhead", peer=measure("torchdata", "overhead")),
        row("indices of an own batch, 8 ranks", "µs", *cut(8), peer=measure("accelerate", *cut(8)), max_ratio=1),
        row(
            "indices of an own batch, 1,024 ranks",
            "µs",
            *cut(1024),
            peer=measure("accelerate", *cut(1024)),
            max_ratio=1,
        ),
    ]
    for order in ("sequential", "permutation"):
        base = measure("accel", *cut(8, order))
        for world in (1024, 100_000):
            name = f"{order}, {world:,} ranks over 8"
            rows.append(row(name, "µs", *cut(world, order), peer=base, max_ratio=FLAT))
    rows += [
        row(
            "first batch after skipping 240,000",
            "ms",
            *skip(few),
            peer=measure("accelerate", *skip(few)),
            max_ratio=0.1,
        ),
        row(
            "first batch after skipping 2,400,000",
            "ms",
            *skip(many),
            peer=measure("accelerate", *skip(many)),
            max_ratio=0.1,
        ),
        row(
            "first batch after the state of 240,000, torchdata",
            "ms",
            *resume(few),
            peer=measure("torchdata", *resume(few)),
            max_ratio=0.1,
        ),
    ]
    for order in ("sequential", "permutation"):
        base = measure("accel", *skip(few, order))
        name = f"{order}, skipping 2,400,000 over 240,000"
        rows.append(row(name, "ms", *skip(many, order), peer=base, max_ratio=FLAT))
    rows += [
        row("permutation of 10^12, per index of 8,192", "µs", "block", max_ours=0.2),
        row("permutation of 10^12, a single index", "µs", "single", max_ours=5),
        row("first batch of 10^12 shuffled samples", "ms", "trillion", max_ours=1),
        row("bytes sent over bytes of the part", "", "bytes", max_ours=1.05),
    ]
    return report("bench_data: sharding, skipping and shuffling", rows, options)


if __name__ == "__main__":
    sys.exit(main())
