"""Before the process group is made: are all ranks here, and do they agree how many they are?"""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not listed

from accel_state.collectives.absence import ranks_text
from accel_state.errors import ProcessGroupError


def agree_on_size(store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Return when all ranks are here and were given one world size.

    Rank 0 hears from everyone and tells its own number to all; so a rank that was given another one finds out, and so
    does rank 0.

    Raises:
        ProcessGroupError: the numbers differ, or ranks did not come; names them.

    Cost: two keys in the store per rank, one to write and one to read.
    """
    store.set(f"size/{rank}", str(world_size))
    if rank == 0:
        _hear_from_everyone(store, world_size, timeout)
        store.set("size", str(world_size))
        return
    if not _wait(store, ["size", "size refused"], timeout):
        raise ProcessGroupError(
            f"rank 0 did not come to the meeting place, or not all others did, within {timeout.total_seconds():g} s; "
            f"rank {rank} of {world_size} waited there"
        )
    if store.check(["size refused"]):
        raise ProcessGroupError(str(store.get("size refused"), errors="replace"))
    told = int(store.get("size"))
    if told != world_size:
        raise ProcessGroupError(_differ(told, rank, world_size))


def _hear_from_everyone(store: Store, world_size: int, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    for rank in range(1, world_size):
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        if not _wait(store, [f"size/{rank}"], left):
            absent = [other for other in range(world_size) if not store.check([f"size/{other}"])]
            error = f"{ranks_text(absent)} of {world_size} never came within {timeout.total_seconds():g} s"
            store.set("size refused", error)
            raise ProcessGroupError(error)
        told = int(store.get(f"size/{rank}"))
        if told != world_size:
            error = _differ(world_size, rank, told)
            store.set("size refused", error)
            raise ProcessGroupError(error)


def _wait(store: Store, keys: list[str], timeout: timedelta) -> bool:
    """Whether one of the keys is there before the time is over."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        if any(store.check([key]) for key in keys):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)


def _differ(of_rank_0: int, rank: int, of_rank: int) -> str:
    return (
        f"rank 0 was told that the job has {of_rank_0} ranks, rank {rank} that it has {of_rank}: give all of them one "
        "WORLD_SIZE (number of processes)"
    )
