"""What launching costs: an empty script on two processes, from the command to its end.

The peer runs with ``--multi_gpu``, which starts two processes on a machine without a GPU too: its ``--cpu`` starts one.
Bound: at most 0.2 times the peer's.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench.pairing import arguments, compare, report, wall_time_s


def main() -> int:
    """Compare launches of an empty script; returns 1 when the bound is missed."""
    options = arguments(__doc__ or "", rounds=5)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "empty.py"
        script.touch()
        peer = [options.peer.parent / "accelerate", "launch", "--multi_gpu", "--num_processes", "2", script]
        ours = [options.ours.parent / "accel", "launch", "--cpu", "--num-processes", "2", script]
        row = compare(
            "launch of an empty script, 2 processes",
            "s",
            peer=lambda: wall_time_s(peer),
            ours=lambda: wall_time_s(ours),
            rounds=options.rounds,
            max_ratio=0.2,
        )
    return report("bench_launch: bringing processes to life", [row], options)


if __name__ == "__main__":
    sys.exit(main())
