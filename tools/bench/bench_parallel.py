"""DDP and `fully_shard` through the libraries, beside raw torch, on two gloo ranks.

Each measurement is a run of its own on two ranks (``measured_parallel.py``). Steps and `prepare` are measured in turn
with raw torch's in the same run; rows "over raw" are ratios or differences of such pairs. The peer leaves FSDP out on
CPUs; its state is told here that it has it, which reaches its steps and `prepare`, but not its loading.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from bench.pairing import Row, arguments, compare, output_of, report

MEASURED = Path(__file__).parent / "measured_parallel.py"
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
MAX_ADDED_US, MAX_ADDED_SHARE = 15.0, 0.01  # whichever is larger
NAMES = {"ddp": "DDP", "fsdp2": "fully_shard"}


def main() -> int:
    """Compare all rows; returns 1 when a bound is missed."""
    options = arguments(__doc__ or "", rounds=3)

    def figures(library: str, figure: str, kind: str, *more: str) -> dict[str, float]:
        python = options.peer if library == "accelerate" else options.ours
        command = [python, *LAUNCHER, MEASURED, "--library", library, "--figure", figure, "--kind", kind, *more]
        found: dict[str, float] = json.loads(output_of(command).strip().splitlines()[-1])
        return found

    def row(name: str, unit: str, library: str | None, figure: str, kind: str, key: str, **bounds: float) -> Row:
        return compare(
            name,
            unit,
            peer=(lambda: figures(library, figure, kind)[key]) if library else None,
            ours=lambda: figures("accel", figure, kind)[key],
            rounds=options.rounds,
            **bounds,
        )

    def step_row(kind: str) -> Row:
        raw_us = figures("accel", "step", kind)["raw_us"]
        print(f"{kind}: the raw step takes {raw_us:.0f} µs", file=sys.stderr)
        allowed_us = max(MAX_ADDED_US, MAX_ADDED_SHARE * raw_us)
        name = f"added to a step of {NAMES[kind]}"
        return row(name, "µs", "accelerate", "step", kind, "added_us", max_ours=allowed_us)

    rows = [step_row(kind) for kind in NAMES]
    for kind, name in NAMES.items():
        title = f"peak of tensors in training, {name}, to raw"
        rows.append(row(title, "B", "torch", "memory", kind, "peak_bytes", max_ratio=1.01))
    rows.append(
        row("prepare of 1,000 modules, over raw", "x", "accelerate", "prepare", "fsdp2", "prepare_over_raw",
            max_ours=1.1, max_ratio=1.0)
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench-parallel-") as folder:
        path = str(Path(folder) / "model.safetensors")
        output_of([options.ours, MEASURED, "--write", "--library", "torch", "--figure", "load", "--kind", "fsdp2",
                   "--checkpoint", path])  # fmt: skip
        rows.append(
            compare(
                "peak of 2 ranks loading 1.07 GB, to its size",
                "x",
                peer=None,
                ours=lambda: figures("accel", "load", "fsdp2", "--checkpoint", path)["peak_over_size"],
                rounds=options.rounds,
                max_ours=1.5,
            )
        )
    return report("bench_parallel: two gloo ranks", rows, options)


if __name__ == "__main__":
    sys.exit(main())
