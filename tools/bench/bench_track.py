"""What logging 20 numbers costs the training thread. Bound: at most 30 µs with jsonl.

Each measurement is a process of its own (``measured_track.py``). The peer has no jsonl.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.pairing import arguments, compare, output_of, report

MEASURED = Path(__file__).parent / "measured_track.py"


def main() -> int:
    """Measure; returns 1 when the bound is missed."""
    options = arguments(__doc__ or "", rounds=5)
    command = [options.ours, MEASURED]
    row = compare(
        "log of 20 numbers to jsonl",
        "µs",
        peer=None,
        ours=lambda: float(output_of(command)),
        rounds=options.rounds,
        max_ours=30,
    )
    return report("bench_track: logging", [row], options)


if __name__ == "__main__":
    sys.exit(main())
