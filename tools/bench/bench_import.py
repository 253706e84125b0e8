"""What importing costs: ``from accel import Accelerator`` on top of torch, and the command line's help.

Bounds: at most half of the peer's import time; help within 0.15 s (which leaves no room for importing torch).
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.pairing import Row, arguments, compare, output_of, report, wall_time_s

TIMED_IMPORT = """
import time
import torch
start = time.perf_counter()
from {module} import Accelerator
print(time.perf_counter() - start)
"""


def main() -> int:
    """Compare imports and help texts; returns 1 when a bound is missed."""
    options = arguments(__doc__ or "", rounds=7)

    def import_time_s(python: Path, module: str) -> float:
        return float(output_of([python, "-c", TIMED_IMPORT.format(module=module)]))

    def help_time_s(script: Path, *command: str) -> float:
        return wall_time_s([script, *command, "--help"])

    def help_row(command: list[str]) -> Row:
        return compare(
            " ".join(["accel", *command, "--help"]),
            "s",
            peer=lambda: help_time_s(peer, *command),
            ours=lambda: help_time_s(ours, *command),
            rounds=options.rounds,
            max_ours=0.15,
        )

    ours, peer = options.ours.parent / "accel", options.peer.parent / "accelerate"
    rows = [
        compare(
            "import Accelerator, over torch",
            "s",
            peer=lambda: import_time_s(options.peer, "accelerate"),
            ours=lambda: import_time_s(options.ours, "accel"),
            rounds=options.rounds,
            max_ratio=0.5,
        ),
        *(help_row(command) for command in ([], ["launch"])),
    ]
    return report("bench_import: starting up", rows, options)


if __name__ == "__main__":
    sys.exit(main())
