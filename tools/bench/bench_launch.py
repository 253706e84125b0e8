"""What launching costs: an empty script on two processes, from the command to its end.

The peer runs with ``--multi_gpu``, which starts two processes on a machine without a GPU too: its ``--cpu`` starts one.
Bounds: at most 0.2 times the peer's; with restarts, by torch elastic, at most 0.95 times, and 0.1 s over bare torchrun.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench.pairing import arguments, compare, report, wall_time_s


def main() -> int:
    """Compare launches of an empty script; returns 1 when a bound is missed."""
    options = arguments(__doc__ or "", rounds=5)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "empty.py"
        script.touch()
        peer = [options.peer.parent / "accelerate", "launch", "--multi_gpu", "--num_processes", "2"]
        ours = [options.ours.parent / "accel", "launch", "--cpu", "--num-processes", "2"]
        restarts = ["--max_restarts", "1"]
        torchrun = [options.ours, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *restarts]

        def beyond_torchrun_s() -> float:
            bare_s = wall_time_s([*torchrun, script])
            return wall_time_s([*ours, *restarts, script]) - bare_s

        rows = [
            compare(
                "launch of an empty script, 2 processes",
                "s",
                peer=lambda: wall_time_s([*peer, script]),
                ours=lambda: wall_time_s([*ours, script]),
                rounds=options.rounds,
                max_ratio=0.2,
            ),
            compare(
                "the same with restarts, by torch elastic",
                "s",
                peer=lambda: wall_time_s([*peer, *restarts, script]),
                ours=lambda: wall_time_s([*ours, *restarts, script]),
                rounds=options.rounds,
                max_ratio=0.95,
            ),
            compare(
                "the same, beyond torchrun alone",
                "s",
                peer=None,
                ours=beyond_torchrun_s,
                rounds=options.rounds,
                max_ours=0.1,
            ),
        ]
    return report("bench_launch: bringing processes to life", rows, options)


if __name__ == "__main__":
    sys.exit(main())
