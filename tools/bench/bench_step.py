"""What a prepared step costs beyond a bare torch step, on a model so small that little else is left.

Each measurement is a process of its own (``measured_step.py``) that runs a bare step and a prepared one in turn and
tells the difference of their medians. The bare twin of the bf16 row runs under ``torch.autocast``.
Bound: at most a tenth of what the peer adds; and for autocast and the conversion of outputs, 10 µs over autocast alone.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from bench.pairing import Row, arguments, compare, output_of, report

MEASURED = Path(__file__).parent / "measured_step.py"
ROWS = {
    "plain": "added to a plain step",
    "accumulate": "added to a step under accumulate",
    "bf16": "added to a bf16 step",
}
MAX_ADDED_US = {"bf16": 10.0}


def main() -> int:
    """Compare the added time of each kind of step; returns 1 when a bound is missed."""
    options = arguments(__doc__ or "", rounds=5)
    bare_us: list[float] = []

    def added_us(python: Path, module: str, kind: str) -> float:
        figures = json.loads(output_of([python, MEASURED, "--library", module, "--kind", kind]))
        bare_us.append(figures["bare_us"])
        return float(figures["added_us"])

    def row(kind: str) -> Row:
        bare_us.clear()
        found = compare(
            ROWS[kind],
            "µs",
            peer=lambda: added_us(options.peer, "accelerate", kind),
            ours=lambda: added_us(options.ours, "accel", kind),
            rounds=options.rounds,
            max_ratio=0.1,
            max_ours=MAX_ADDED_US.get(kind),
        )
        print(f"{kind}: the bare step takes {statistics.median(bare_us):.0f} µs", file=sys.stderr)
        return found

    return report("bench_step: time added to a bare torch step", [row(kind) for kind in ROWS], options)


if __name__ == "__main__":
    sys.exit(main())
