"""Ranks that write their parts in the background, and how rank 0 learns that they are done without talking to them.

Each of them holds the lock of a file in the staging directory until its report lies beside it; a lock that is free
without a report is that of a dead process.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from accel_state.errors import CheckpointError

from .codec import load_json
from .durable import FileEntry, read_json_bytes, rename_into_place, write_file
from .names import CREW_MARK
from .owner import Alive, Claim, claim, take_over

# Where the file system has no locks, nothing tells a slow rank of another host from a dead one.
_PATIENCE_WITHOUT_LOCKS_S = 3600.0


def enlist(path: Path, rank: int) -> Claim:
    """Say that a rank will report; before rank 0 may wait for it."""
    return claim(path, _lock(rank))


def report(path: Path, rank: int, written: Mapping[str, FileEntry], failures: Sequence[str], lock: Claim) -> None:
    """Tell rank 0 what was written, or why not; then let go of the lock."""
    entries = {name: dataclasses.asdict(entry) for name, entry in written.items()}
    try:
        draft = path / f"{_report(rank)}.new"
        write_file(draft, [json.dumps({"written": entries, "failures": list(failures)}).encode()])
        rename_into_place(draft, path / _report(rank))
    finally:
        lock.release()


def collect(path: Path, ranks: Iterable[int]) -> dict[str, FileEntry]:
    """Wait for the reports of ranks; what all of them wrote. Their files of this kind are gone afterwards.

    Raises:
        CheckpointError: ranks failed or died, and how; only once none of them writes any more.
    """
    written: dict[str, FileEntry] = {}
    failures = []
    for rank in ranks:
        try:
            _wait_for(path, rank)
            found = load_json(read_json_bytes(path / _report(rank)), f"the report of rank {rank}")
        except CheckpointError as error:
            failures.append(str(error))
            continue
        failures += [f"rank {rank}: {failure}" for failure in found["failures"]]
        written.update({name: FileEntry(**entry) for name, entry in found["written"].items()})
        (path / _report(rank)).unlink()
        (path / _lock(rank)).unlink()
    if failures:
        raise CheckpointError("; ".join(failures))
    return written


def _wait_for(path: Path, rank: int) -> None:
    pause_s, gives_up = 0.005, time.monotonic() + _PATIENCE_WITHOUT_LOCKS_S
    while not (path / _report(rank)).exists():
        try:
            lock = take_over(path, _lock(rank))
        except Alive as alive:
            if not alive.certain and time.monotonic() > gives_up:
                raise CheckpointError(f"rank {rank} has not written its part within an hour") from None
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.2)
            continue
        if lock is not None:
            lock.release()
        if not (path / _report(rank)).exists():
            raise CheckpointError(f"rank {rank} ended before it had written its part")


def _lock(rank: int) -> str:
    return f"{CREW_MARK}{rank:05d}.lock"


def _report(rank: int) -> str:
    return f"{CREW_MARK}{rank:05d}.json"
