"""A 1 GB model loaded and run from disk, and a plan for 10,000 modules, beside the peer.

Each measurement is a process of its own (``measured_big.py``) that gives all figures of one library; the libraries take
turns. The file lies in the system's cache, so that both are measured and not the disk. Reading its bytes is measured in
our process and stands in the peer's column.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from bench.pairing import Row, arguments, compare, output_of, report

MEASURED = Path(__file__).parent / "measured_big.py"
# name, unit, figure of the peer's ("own:" in our process), figure of ours, bound on the ratio
ROWS = (
    ("load_checkpoint_and_dispatch, 1 GB to the CPU", "s", "load", "load", 1.0),
    ("the same with every page read, to reading", "s", "own:read", "load_and_read", 1.2),
    ("the same, extra peak memory", "MB", "load_peak", "load_peak", None),
    ("extra peak memory, model with numbers", "MB", "refill_peak", "refill_peak", 0.5),
    ("forward of 1 GB offloaded to disk", "s", "forward", "forward", 0.7),
    ("the same, the first one", "s", "first_forward", "first_forward", 0.7),
    ("infer_auto_device_map, 10,000 modules", "s", "plan", "plan", 0.1),
)


def main() -> int:
    """Compare all figures; returns 1 when a bound is missed."""
    options = arguments(__doc__ or "", rounds=3)
    peers, mine = [], []
    with tempfile.TemporaryDirectory(prefix="bench-big-") as folder:
        for _ in range(options.rounds + 1):
            peers.append(_figures(options.peer, "accelerate", Path(folder, "model")))
            mine.append(_figures(options.ours, "accel", Path(folder, "model")))

    def row(name: str, unit: str, peer: str, ours: str, max_ratio: float | None) -> Row:
        scale = 1e-6 if unit == "MB" else 1.0
        source = mine if peer.startswith("own:") else peers
        theirs = iter([figures[peer.removeprefix("own:")] * scale for figures in source])
        values = iter([figures[ours] * scale for figures in mine])
        return compare(
            name,
            unit,
            peer=lambda: next(theirs),
            ours=lambda: next(values),
            rounds=options.rounds,
            max_ratio=max_ratio,
        )

    return report("bench_big: a model of 1 GB, and one of 10,000 modules", [row(*parts) for parts in ROWS], options)


def _figures(python: Path, library: str, checkpoint: Path) -> dict[str, float]:
    command: list[str | Path] = [python, MEASURED, "--library", library, "--checkpoint", checkpoint]
    figures: dict[str, float] = json.loads(output_of(command).splitlines()[-1])
    return figures


if __name__ == "__main__":
    sys.exit(main())
