"""Messages of all ranks, rank after rank. Order is a courtesy to readers: it never hangs, whoever logs or does not.

Each rank tells the next one how often it has been at each place; one that does not come is waited for once, and is then
taken to be absent from that place until it is heard from there again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from accel_state.callsite import call_site
from accel_state.collectives.channel import Channel
from accel_state.polling import until

_PATIENCE_S = 5.0


@dataclass
class _Turns:
    """What a rank knows of turns, its own and those of the rank before it.

    Args:
        mine: how often this rank has been at each place.
        behind: by how many turns the rank before lags at a place: those that it did not come for.
        absent: places where it was waited for in vain, and how often it had been there.
        silent_at: how often it had been anywhere, when it was last waited for in vain.
    """

    mine: dict[str, int] = field(default_factory=dict)
    behind: dict[str, int] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict)
    silent_at: int | None = None


_turns: WeakKeyDictionary[Channel, _Turns] = WeakKeyDictionary()


@contextmanager
def in_rank_order(name: str) -> Iterator[None]:
    """Run the block after the rank before this one has run it; see the module.

    Args:
        name: what is done, beside the line of the user's code that does it.

    Cost: a key in the store per rank, written once per block; the last rank writes none.
    """
    from accel_state.process_group import known_job

    job = known_job()
    if job is None or job.channel is None or job.channel.world_size == 1 or job.channel.is_copy:
        yield  # alone, or a forked worker, which must not use the ranks' connection to the store
        return
    channel = job.channel
    place = f"{name} at {call_site()}"
    turns = _turns.setdefault(channel, _Turns())
    turns.mine[place] = turns.mine.get(place, 0) + 1
    try:
        with suppress(RuntimeError):  # the store went with rank 0: there is no order left to keep
            if channel.rank > 0:
                _wait_for_the_one_before(channel, turns, place)
        yield
    finally:
        with suppress(RuntimeError):
            if channel.rank + 1 < channel.world_size:
                channel.store.set(_key(channel.rank), json.dumps(turns.mine))


def _wait_for_the_one_before(channel: Channel, turns: _Turns, place: str) -> None:
    before = channel.rank - 1
    turn = turns.mine[place]
    counts = _counts(channel, before)
    is_absent = counts.get(place, 0) == turns.absent.get(place) or sum(counts.values()) == turns.silent_at
    if not is_absent:
        needed = turn - turns.behind.get(place, 0)
        if not until(lambda: _counts(channel, before).get(place, 0) >= needed, _PATIENCE_S):
            counts = _counts(channel, before)
            turns.absent[place], turns.silent_at = counts.get(place, 0), sum(counts.values())
        else:
            counts = _counts(channel, before)
            turns.absent.pop(place, None)
    turns.behind[place] = max(turn - counts.get(place, 0), 0)


def _counts(channel: Channel, rank: int) -> dict[str, int]:
    """How often a rank has been at each place."""
    key = _key(rank)
    if not channel.store.check([key]):
        return {}
    counts: dict[str, int] = json.loads(channel.store.get(key))
    return counts


def _key(rank: int) -> str:
    return f"order/{rank}"
