"""One rank before the others, by a key in the store: no collective, so no time-out while the first one works."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from accel_state.callsite import call_site
from accel_state.collectives.absence import fate
from accel_state.collectives.call import GoingFirst
from accel_state.collectives.channel import Channel
from accel_state.errors import ProcessGroupError
from accel_state.polling import until

_LOOK_AFTER_S = 1.0  # how often those who wait find out whether the first rank still lives


def name_local_main(channel: Channel, node_rank: int) -> None:
    """Tell this machine's ranks which of all ranks is their first: they need not be numbered one after the other."""
    channel.store.set(f"local-main/{node_rank}", str(channel.rank))


def local_main(channel: Channel, node_rank: int) -> int:
    """The rank of this machine's first process. Waits, within the store's time-out, until that one has joined."""
    return int(channel.store.get(f"local-main/{node_rank}"))


@contextmanager
def goes_first(is_first: bool, first: int | None, name: str) -> Iterator[None]:
    """Run the block on rank `first` (None: this machine's), then on those that wait for it, however long it takes.

    Raises:
        ProcessGroupError: the first rank failed in its block or has died, came here inside another such block while
            this rank did not, called a collective in its block, or the store is gone with it.
    """
    from accel_state.process_group import current_job

    channel = current_job().channel
    if channel is None or channel.world_size == 1:
        yield
        return
    if channel.is_copy:
        raise ProcessGroupError(
            f"{name} was called in a forked process (say, a data loader's worker): only the process that made the "
            "group can wait for the other ranks"
        )
    if first is None:
        first = local_main(channel, current_job().topology.node_rank)
    key = f"first/{name}/{first}/{channel.next_turn(name)}"
    around = channel.going_first
    here = GoingFirst(name, call_site(), 1 if around is None else around.depth + 1, threading.get_ident())
    if not is_first:
        _wait_for(channel, key, first, here)
    channel.going_first = here if is_first else here._replace(thread=0)  # who comes second may talk to others
    error = ""
    try:
        yield
    except BaseException as failure:
        error = f"{type(failure).__name__}: {failure}"
        raise
    finally:
        channel.going_first = around
        if is_first:
            channel.store.set(key, json.dumps([here.depth, here.site, error]))


def _wait_for(channel: Channel, key: str, first: int, here: GoingFirst) -> None:
    waits = f"rank {channel.rank} waits in {here.name} at {here.site} for rank {first}"
    store = channel.store
    try:
        while not until(lambda: store.check([key]), _LOOK_AFTER_S):
            words = fate(store, first)
            if words is not None and "stopped" not in words and not store.check([key]):
                raise ProcessGroupError(f"{waits}, which {words}")
        depth, site, failure = json.loads(str(store.get(key), errors="replace"))
    except ProcessGroupError:
        raise
    except RuntimeError as error:
        raise ProcessGroupError(
            f"{waits}, but the store of the job (on rank 0, or with the launcher) is gone: {error}"
        ) from error
    if failure:
        raise ProcessGroupError(f"{waits}, which went first at {site} and failed there: {failure}")
    if depth != here.depth:
        raise ProcessGroupError(
            f"{waits}, which went first at {site}, at depth {depth} of such blocks, while this rank is at depth "
            f"{here.depth}: every rank has to enter the same blocks in the same order"
        )
