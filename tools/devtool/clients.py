"""``tools/dev clients``: libraries that build on the peer, unmodified, on the peer and on accel's alias of it.

Their environment, ``.cache/clients``, has them and the peer as pinned in ``uv.lock`` (group ``clients``), accel's
wheels, and torch by the links of ``tools/dev isolated``. Each script of ``integration-tests/clients`` runs on one and
on two processes with both libraries; what it prints has to agree.

Runs inside ``.venv``: it needs ``packaging``.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devtool.isolated import build_wheels, install_wheels, link_torch, shared_lines
from devtool.paths import CACHE, ROOT, Command
from devtool.side_environments import side_environment
from devtool.tests import test_environment

FOLDER = CACHE / "clients"
SCRIPTS = ROOT / "integration-tests" / "clients"
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- clients: written by `tools/dev clients --write` -->", "<!-- end of clients -->"
LIMIT_S = 900
REPORTED = ["transformers", "trl", "peft", "sentence-transformers", "diffusers", "accelerate", "torch"]
Result = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One client on one number of processes: what both libraries gave."""

    client: str
    processes: int
    ours: Result
    peer: Result
    seconds: float

    @property
    def verdict(self) -> str:
        """ "same", or what is wrong and with whom."""
        if "error" in self.ours:
            return "fails on both" if "error" in self.peer else "FAILS on accel"
        if "error" in self.peer:
            return "runs; fails on the peer"
        different = differences(self.ours, self.peer)
        return f"DIFFERS: {', '.join(different)}" if different else "same"

    @property
    def is_good(self) -> bool:
        """Whether accel did no worse than the peer."""
        return self.verdict in ("same", "fails on both", "runs; fails on the peer")


def names() -> list[str]:
    """The clients that there are."""
    return sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "common")


def run_clients(chosen: Sequence[str], processes: Sequence[int], write: bool) -> int:
    """Run clients on both libraries and print a table; returns 1 when accel does worse than the peer anywhere."""
    torch = link_torch()
    selection = ("--package", "accel-workspace", "--only-group", "clients")
    python = side_environment(
        FOLDER / "env", shared_lines(torch), selection, text="for libraries on top (minutes, once)"
    )
    install_wheels("accel", build_wheels(), python)
    rows = []
    for client in chosen:
        for count in processes:
            start = time.monotonic()
            ours, peer = (_run_one(python, client, count, library) for library in ("accel", "accelerate"))
            rows.append(Row(client, count, ours, peer, time.monotonic() - start))
            print(f"{client:<12} {count} process(es)  {rows[-1].verdict}  {rows[-1].seconds:.0f} s", flush=True)
            for library, result in (("accel", ours), ("the peer", peer)):
                if "error" in result:
                    print(f"  {library}: {result['error']}")
    if write:
        _write(rows, python)
    return int(not all(row.is_good for row in rows))


def differences(ours: Result, peer: Result) -> list[str]:
    """Names of the results that disagree: numbers beyond 1e-5 (bf16: 1e-2), anything else at all."""
    names = (ours.keys() | peer.keys()) - {"library"}
    return sorted(
        name for name in names if not _agree(ours.get(name), peer.get(name), 1e-2 if name == "bf16" else 1e-5)
    )


def _agree(ours: Any, peer: Any, tolerance: float) -> bool:
    if isinstance(ours, list) and isinstance(peer, list):
        return len(ours) == len(peer) and all(map(_agree, ours, peer, [tolerance] * len(ours)))
    if isinstance(ours, float) and isinstance(peer, float):
        return math.isclose(ours, peer, rel_tol=tolerance, abs_tol=tolerance)
    return bool(ours == peer)


def _run_one(python: Path, client: str, processes: int, library: str) -> Result:
    """Run a script in a fresh folder; what it told, or the end of its output under "error"."""
    folder = FOLDER / "runs" / f"{client}-{processes}-{library}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    script: Command = [SCRIPTS / f"{client}.py", folder]
    starts: dict[tuple[str, bool], Command] = {
        ("accel", True): ["-m", "accel_launch", "launch", "--as-accelerate", "--cpu", "--num-processes", processes],
        ("accel", False): ["-m", "accel.compat"],
        # the peer's own launcher starts one process on a CPU, whatever it was asked for
        ("accelerate", True): ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes],
        ("accelerate", False): [],
    }
    command = [python, *starts[library, processes > 1], *script]
    environment = {name: value for name, value in test_environment().items() if name != "PYTHONPATH"}
    environment.update(HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true", PATH=f"{python.parent}:{os.environ['PATH']}")
    log = folder / "output.txt"
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                [str(part) for part in command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                timeout=LIMIT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return {"error": f"no end after {LIMIT_S} s; see {log.relative_to(ROOT)}"}
    result = folder / "result.json"
    if code != 0 or not result.exists():
        lines = log.read_text(errors="replace").strip().splitlines()
        return {"error": f"exit code {code}: {lines[-1] if lines else 'no output'}; see {log.relative_to(ROOT)}"}
    told: Result = json.loads(result.read_text())
    if told["library"] != library or told["world_size"] != processes:
        return {"error": f"answered by {told['library']} on {told['world_size']} process(es)"}
    return told


def _write(rows: Sequence[Row], python: Path) -> None:
    """Put the table into the page, between its marks."""
    code = "import importlib.metadata as m, sys; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"
    said = subprocess.run([str(python), "-c", code, *REPORTED], check=True, capture_output=True, text=True).stdout
    lines = ["| client | processes | on accel, beside the peer |", "|---|---|---|"]
    lines += [f"| `{row.client}.py` | {row.processes} | {row.verdict} |" for row in rows]
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(f"{before}\n\n{said.strip()}\n\n" + "\n".join(lines) + f"\n\n{after}")
