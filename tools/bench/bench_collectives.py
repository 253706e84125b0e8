"""What collectives cost on two gloo ranks, beside the peer and raw torch.

Each measurement is a run of its own on two ranks (``measured_collectives.py``), of the peer and of ours alternately. A
small tensor is compared with torch's own ``all_gather`` in the same run: ours checks what all ranks bring, and with
``uniform=True`` does not; the peer does not.
"""

from __future__ import annotations

import json
import statistics
import sys
from itertools import count
from pathlib import Path

from bench.pairing import Row, arguments, compare, output_of, report

MEASURED = Path(__file__).parent / "measured_collectives.py"
ROWS = (  # of the figures: title, name, bound on the ratio
    ("gather of a dict of 32 tensors", "gather dict", 0.1),
    ("reduce of a small tensor", "reduce", 1.0),
    ("gather_object", "gather_object", 1.0),
    ("split_between_processes of 1000 items", "split", 1.0),
    ("send_to_device of 100 tensors", "send_to_device", 1.0),
)


class Figures:
    """The measurements of one library, made when they are asked for: row after row the same ones."""

    def __init__(self, python: Path, library: str) -> None:
        self.python = python
        self.library = library
        self.runs: list[dict[str, float]] = []

    def of(self, number: int) -> dict[str, float]:
        """What a run found, by its number."""
        while len(self.runs) <= number:
            launcher: list[str | Path] = [
                self.python,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
            ]
            output = output_of([*launcher, MEASURED, "--library", self.library])
            self.runs.append(json.loads(output.strip().splitlines()[-1]))
        return self.runs[number]

    def added(self, number: int, name: str) -> float:
        """What the library's call of a run takes beyond the raw one."""
        return self.of(number)[name] - self.of(number)[f"raw {name}"]

    def median(self, name: str) -> float:
        """Over all runs but the first."""
        return statistics.median(run[name] for run in self.runs[1:])


def main() -> int:
    """Compare row by row; returns 1 when a bound is missed."""
    options = arguments(__doc__ or "", rounds=3)
    peer, ours = Figures(options.peer, "accelerate"), Figures(options.ours, "accel_state")

    def row(title: str, unit: str, peers: str, mine: str, **bound: float) -> Row:
        peer_runs, our_runs = count(), count()
        return compare(
            title,
            unit,
            peer=lambda: peer.of(next(peer_runs))[peers],
            ours=lambda: ours.of(next(our_runs))[mine],
            rounds=options.rounds,
            **bound,
        )

    rows = [
        row("gather of a small tensor, over raw", "x", "gather over raw", "gather over raw", max_ours=1.5),
        row("the same, uniform=True, over raw", "x", "gather over raw", "gather uniform over raw", max_ours=1.1),
        *(row(title, "µs", name, name, max_ratio=bound) for title, name, bound in ROWS),
    ]
    runs = count()
    rows.append(
        compare(
            "should_stop, added to 1 ms and an all-reduce",
            "µs",
            peer=None,
            ours=lambda: ours.added(next(runs), "should_stop"),
            rounds=options.rounds,
        )
    )
    for name in ("gather", "reduce", "gather_object"):
        print(f"{name}: raw torch takes {ours.median(f'raw {name}'):.0f} µs", file=sys.stderr)
    return report("bench_collectives: two gloo ranks", rows, options)


if __name__ == "__main__":
    sys.exit(main())
