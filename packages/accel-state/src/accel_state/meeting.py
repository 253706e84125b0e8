"""Before the process group is made: where the ranks meet, whether all are here, and how many they think they are."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not listed
from torch.distributed.rendezvous import rendezvous

from accel_state.collectives.absence import ranks_text
from accel_state.environment import patch_environment
from accel_state.errors import ProcessGroupError
from accel_state.polling import until
from accel_state.topology import Topology

_GRACE_S = 3.0  # beyond a time-out: for torch to say itself what is wrong, and for others to hear what this rank said
_stores: dict[str, Store] = {}


def meeting_place(url: str, topology: Topology, timeout: timedelta) -> Store:
    """The store of the job, connected to, or made on rank 0. Does not wait for the other ranks.

    It outlives process groups: one made after another was destroyed finds it again, where a new one could still reach
    the old one's host, which is about to go.

    Args:
        url: as of `torch.distributed.init_process_group`.
        topology: of this process.
        timeout: for finding the store, and of what is asked of it later.

    Raises:
        ProcessGroupError: something else answers at the meeting place; names it.
        RuntimeError: of torch: nobody answers there, or rank 0 cannot listen.
    """
    if url not in _stores:
        _stores[url] = _connected(url, topology, timeout)
        _stores[url].set_timeout(timeout)
    return _stores[url]


def _connected(url: str, topology: Topology, timeout: timedelta) -> Store:
    rank, size = topology.rank, topology.world_size
    if url.startswith(("env://", "tcp://")):
        # -1: do not wait for that many ranks. Ranks that were given different numbers could not tell each other.
        url += f"{'&' if '?' in url else '?'}rank={rank}&world_size=-1"
        rank = size = -1
    found: list[Store | Exception] = []

    def connect() -> None:
        try:
            found.append(next(rendezvous(url, rank, size, timeout=timeout))[0])
        except Exception as error:  # noqa: BLE001  (goes to the caller)
            found.append(error)

    place = {"MASTER_ADDR": topology.master_address, "MASTER_PORT": topology.master_port}
    with patch_environment(**place):  # where torch looks; not every launcher sets it
        # Where another program listens at the port, torch waits for its answer for ever: it has to be left behind.
        thread = threading.Thread(target=connect, daemon=True, name="accel-meeting")
        thread.start()
        limit_s = timeout.total_seconds() + _GRACE_S
        while not until(lambda: bool(found), limit_s):
            if not _answers(topology):  # nobody is there: torch is about to say so, in its own time
                continue
            raise ProcessGroupError(
                f"what listens there is not the store of the job: it did not answer within {limit_s:g} s. Another "
                "program uses the port: choose another MASTER_PORT"
            )
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _answers(topology: Topology) -> bool:
    """Whether anything listens at the meeting place."""
    try:
        with socket.create_connection((topology.master_address, topology.master_port), timeout=_GRACE_S):
            return True
    except OSError:
        return False


def agree_on_size(store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Return when all ranks are here and were given one world size.

    Rank 0 hears from everyone and tells its own number to all; so a rank that was given another one finds out, and so
    does rank 0.

    Raises:
        ProcessGroupError: the numbers differ, or ranks did not come; names them.

    Cost: three keys in the store per rank at most, and a few questions.
    """
    store.set(f"size/{rank}", str(world_size))
    if rank == 0:
        refusal = _refusal(store, world_size, timeout)
        store.set("size refused" if refusal else "size", refusal or str(world_size))
        if refusal:
            _wait_until_heard(store, world_size)
            raise ProcessGroupError(refusal)
        return
    if not until(lambda: store.check(["size"]) or store.check(["size refused"]), timeout.total_seconds() + _GRACE_S):
        raise ProcessGroupError(
            f"rank 0 did not come to the meeting place, or not all others did, within {timeout.total_seconds():g} s; "
            f"rank {rank} of {world_size} waited there"
        )
    if store.check(["size refused"]):
        refusal = str(store.get("size refused"), errors="replace")
        store.set(f"heard/{rank}", "")
        raise ProcessGroupError(refusal)
    told = int(store.get("size"))
    if told != world_size:
        raise ProcessGroupError(_differ(told, {rank: world_size}))


def _refusal(store: Store, world_size: int, timeout: timedelta) -> str:
    """What rank 0 has against going on, or nothing, when all others have come or the time is over."""
    others = range(1, world_size)
    told: dict[int, int] = {}

    def is_decided() -> bool:
        for rank in _arrived(store, (rank for rank in others if rank not in told)):
            told[rank] = int(store.get(f"size/{rank}"))
        return len(told) == len(others) or any(size != world_size for size in told.values())

    if not until(is_decided, timeout.total_seconds()):
        absent = [rank for rank in others if rank not in told]
        return f"{ranks_text(absent)} of {world_size} never came within {timeout.total_seconds():g} s"
    differing = {rank: size for rank, size in told.items() if size != world_size}
    return _differ(world_size, differing) if differing else ""


def _arrived(store: Store, ranks: Iterable[int]) -> list[int]:
    return [rank for rank in ranks if store.check([f"size/{rank}"])]


def _wait_until_heard(store: Store, world_size: int) -> None:
    """Rank 0 may host the store, which ends with it: the others have to read first why."""
    here = _arrived(store, range(1, world_size))
    until(lambda: all(store.check([f"heard/{rank}"]) for rank in here), _GRACE_S)


def _differ(of_rank_0: int, others: dict[int, int]) -> str:
    told = ", ".join(f"rank {rank} that it has {size}" for rank, size in others.items())
    return (
        f"rank 0 was told that the job has {of_rank_0} ranks, {told}: give all of them one WORLD_SIZE (number of "
        "processes)"
    )
