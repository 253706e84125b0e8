"""Measure two libraries alternately and compare them: what every benchmark here shares.

Times vary with what else the machine does, and that drifts. So one round measures the peer and then ours, rounds
follow each other, and a row compares the medians over rounds. The bound of a row is on the ratio, ours over the peer's,
or on our own figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one comparison gave; ``peer`` and ``ours`` are the medians of ``rounds`` measurements each."""

    name: str
    unit: str
    peer: float | None
    ours: float
    rounds: int
    spread: float  # half the range between ours' quartiles, in the same unit
    max_ratio: float | None = None
    max_ours: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.ours / self.peer if self.peer else None

    @property
    def holds(self) -> bool:
        ratio_holds = self.max_ratio is None or (self.ratio is not None and self.ratio <= self.max_ratio)
        return ratio_holds and (self.max_ours is None or self.ours <= self.max_ours)

    @property
    def bound(self) -> str:
        """The bound in words."""
        parts = [] if self.max_ratio is None else [f"ratio <= {self.max_ratio:g}"]
        parts += [] if self.max_ours is None else [f"ours <= {self.max_ours:g} {self.unit}"]
        return ", ".join(parts)


Measure = Callable[[], float]


def compare(
    name: str,
    unit: str,
    *,
    peer: Measure | None,
    ours: Measure,
    rounds: int,
    max_ratio: float | None = None,
    max_ours: float | None = None,
) -> Row:
    """Measure alternately, after one round that does not count (it fills caches)."""
    peers, mine = [], []
    for counted in range(rounds + 1):
        peer_value = peer() if peer else None
        our_value = ours()
        if counted:
            mine.append(our_value)
            if peer_value is not None:
                peers.append(peer_value)
    quartiles = statistics.quantiles(mine, n=4) if len(mine) > 1 else [mine[0]] * 3
    return Row(
        name=name,
        unit=unit,
        peer=statistics.median(peers) if peers else None,
        ours=statistics.median(mine),
        rounds=rounds,
        spread=(quartiles[2] - quartiles[0]) / 2,
        max_ratio=max_ratio,
        max_ours=max_ours,
    )


def arguments(description: str, *, rounds: int) -> argparse.Namespace:
    """The options that every benchmark takes: ``ours`` and ``peer`` are interpreters."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ours", type=Path, required=True, help="the Python that has accel")
    parser.add_argument("--peer", type=Path, required=True, help="the Python that has the peer")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"pairs of runs per row ({rounds})")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    return parser.parse_args()


def environment() -> dict[str, str]:
    """The environment of measured processes: one thread, nothing of ``PYTHONPATH``, no settings for training.

    Bytecode is written (the round that does not count does it), as it is where packages are used.
    """
    dropped = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "ACCEL_", "ACCELERATE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def wall_time_s(command: Sequence[str | Path]) -> float:
    """How long a command takes from start to end; its output is only shown when it fails."""
    start = time.perf_counter()
    output_of(command)
    return time.perf_counter() - start


def output_of(command: Sequence[str | Path]) -> str:
    """What a command prints; its failure ends the benchmark with its output."""
    done = subprocess.run(list(command), env=environment(), capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def report(title: str, rows: Sequence[Row], options: argparse.Namespace) -> int:
    """Print the rows with machine and versions; returns 1 when a bound is missed."""
    about = {"machine": machine(), "versions": versions(options)}
    if options.json:
        listed: list[dict[str, Any]] = [asdict(row) | {"ratio": row.ratio, "holds": row.holds} for row in rows]
        print(json.dumps({"benchmark": title, **about, "rows": listed}))
    else:
        print(f"\n{title}\n{about['machine']}; {about['versions']}")
        print(f"{'':<44} {'peer':>9} {'ours':>9}  {'±':>6} {'unit':<4} {'ratio':>6}  bound")
        for row in rows:
            peer = f"{row.peer:9.3f}" if row.peer is not None else f"{'-':>9}"
            ratio = f"{row.ratio:6.3f}" if row.ratio is not None else f"{'-':>6}"
            bound = f"{row.bound}{'' if row.holds else '   MISSED'}"
            print(f"{row.name:<44} {peer} {row.ours:9.3f}  {row.spread:6.3f} {row.unit:<4} {ratio}  {bound}")
    return int(not all(row.holds for row in rows))


def machine() -> str:
    """The processor, its usable cores and the system, in one line."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {platform.system()}, Python {platform.python_version()}"


def versions(options: argparse.Namespace) -> str:
    """The releases that were compared."""
    code = "import sys; from importlib.metadata import version; "
    code += "print(*(f'{name} {version(name)}' for name in sys.argv[1:]), sep=', ')"
    ours = output_of([options.ours, "-c", code, "accel", "torch"]).strip()
    peer = output_of([options.peer, "-c", code, "accelerate", "torchdata"]).strip()
    return f"{ours}, {peer}"
