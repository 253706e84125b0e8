"""``tools/dev bench``: run ``tools/bench`` with the peer in an environment of its own.

The peer's environment, ``.cache/peer-env``, has the peer and its dependencies as pinned in ``uv.lock`` (group ``peer``)
and sees torch through the same links as ``tools/dev isolated``: both libraries run on the very same torch. Ours is
measured as its users have it, from built wheels with their declared dependencies: ``.cache/isolated/accel``.

Runs inside ``.venv``: it needs ``packaging``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from devtool.isolated import build_wheels, link_torch, make_environment, shared_lines
from devtool.paths import CACHE, ROOT, run
from devtool.side_environments import side_environment

FOLDER = ROOT / "tools" / "bench"
PEER = CACHE / "peer-env"


def names() -> list[str]:
    """The benchmarks that there are: ``import`` for ``tools/bench/bench_import.py``."""
    return sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))


def run_benches(chosen: list[str], *, as_json: bool, rounds: int | None) -> int:
    """Run benchmarks one after the other; returns 1 when one failed or missed a bound."""
    torch = link_torch()
    ours, peer = make_environment("accel", build_wheels(), torch), _peer_environment(torch)
    options: list[object] = ["--ours", ours, "--peer", peer]
    options += ["--json"] if as_json else []
    options += ["--rounds", rounds] if rounds else []
    codes = [run([sys.executable, "-m", f"bench.bench_{name}", *options], cwd=FOLDER.parent) for name in chosen]
    return int(any(codes))


def _peer_environment(torch: Path) -> Path:
    """The interpreter of the peer's environment."""
    return side_environment(
        PEER, shared_lines(torch), ("--package", "accel-workspace", "--only-group", "peer"), text="for the peer"
    )
