"""One rank before the others, by a key in the store: no collective, so no time-out while the first one works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from accel_state.collectives.callsite import call_site
from accel_state.collectives.channel import Channel
from accel_state.errors import ProcessGroupError

_SLICE = timedelta(seconds=1)  # a wait in slices lets Ctrl-C through
_ORDER_PATIENCE = timedelta(seconds=5)


@contextmanager
def goes_first(is_first: bool, first: int, name: str) -> Iterator[None]:
    """Run the block on rank `first`, then on those that wait for it.

    Raises:
        ProcessGroupError: the first rank failed in its block, or the store is gone with it.
    """
    from accel_state.process_group import current_job

    channel = current_job().channel
    if channel is None or channel.world_size == 1:
        yield
        return
    key = f"first/{name}/{first}/{channel.next_turn(name)}"
    if not is_first:
        outcome = _wait_for(channel, key, first, name)
        if outcome:
            raise ProcessGroupError(f"rank {first} went first in {name} at {call_site()} and failed there: {outcome}")
        yield
        return
    try:
        yield
    except BaseException as error:
        channel.store.set(key, f"{type(error).__name__}: {error}")
        raise
    channel.store.set(key, "")


@contextmanager
def in_rank_order(name: str) -> Iterator[None]:
    """Run the block rank after rank; one that has not come after `_ORDER_PATIENCE` is not waited for any longer.

    Order is a courtesy to readers, so that it must never hang: ranks may log on other levels, or not at all.
    """
    from accel_state.process_group import known_job

    job = known_job()
    if job is None or job.channel is None or job.channel.world_size == 1:
        yield
        return
    channel, rank = job.channel, job.channel.rank
    prefix = f"order/{name}/{call_site()}"
    turn = f"{prefix}/{channel.next_turn(prefix)}"
    try:
        if rank > 0:
            with suppress(RuntimeError):
                channel.store.wait([f"{turn}/{rank - 1}"], _ORDER_PATIENCE)
        yield
    finally:
        channel.store.set(f"{turn}/{rank}", "")


def _wait_for(channel: Channel, key: str, first: int, name: str) -> str:
    while True:
        try:
            channel.store.wait([key], _SLICE)
            return str(channel.store.get(key), errors="replace")
        except RuntimeError as error:
            if not _is_slice_over(error):
                raise ProcessGroupError(
                    f"rank {channel.rank} waits in {name} at {call_site()} for rank {first}, but the store of the job "
                    f"(on rank 0, or with the launcher) is gone: {error}"
                ) from error


def _is_slice_over(error: RuntimeError) -> bool:
    text = str(error).lower()
    return "timeout" in text or "timed out" in text
