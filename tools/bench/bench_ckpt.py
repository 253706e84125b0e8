"""Saving and loading 400 MB of model and AdamW state, beside the peer, `torch.save` and plain writes.

Each measurement is a process of its own (``measured_ckpt.py``) that gives all figures of one library; the libraries
take turns. Rows "without flushing" leave `fsync` out, on both sides; the peer never flushes. In rows that compare with
plain writes or `torch.save`, those were measured in our process and stand in the peer's column.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench.pairing import Row, arguments, compare, output_of, report

MEASURED = Path(__file__).parent / "measured_ckpt.py"
# name, unit, figure of the peer's ("own:" in our process), figure of ours, bound on the ratio
ROWS = (
    ("save_state without flushing", "s", "save_state_no_fsync", "save_state_no_fsync", 0.7),
    ("save_state flushed (the peer does not)", "s", "save_state", "save_state", 1.5),
    ("asynchronous save, blocking part, first", "s", "save_state", "async_first", 0.7),
    ("asynchronous save, blocking part, later", "s", "save_state", "async_second", 0.1),
    ("load_state", "s", "load_state", "load_state", 1.0),
    ("load_state, extra peak memory", "MB", "load_peak", "load_peak", 0.5),
    ("save_state without flushing, to torch.save", "s", "own:torch_save", "save_state_no_fsync", None),
    ("save_model without flushing, to plain writes", "s", "own:bytes", "save_model", 1.1),
)


def main() -> int:
    """Compare all figures; returns 1 when a bound is missed."""
    options = arguments(__doc__ or "", rounds=5)
    peers, mine = [], []
    for _ in range(options.rounds + 1):
        peers.append(_figures(options.peer, "accelerate"))
        mine.append(_figures(options.ours, "accel"))

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

    return report("bench_ckpt: 400 MB of model and AdamW state", [row(*parts) for parts in ROWS], options)


def _figures(python: Path, library: str) -> dict[str, float]:
    figures: dict[str, float] = json.loads(output_of([python, MEASURED, "--library", library]).splitlines()[-1])
    return figures


if __name__ == "__main__":
    sys.exit(main())
