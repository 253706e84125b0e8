"""When a collective does not end: who came, what has become of the others, and what they last said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from accel_state.callsite import call_chain
from accel_state.errors import CollectiveMismatchError
from accel_state.liveness import state_of, whereabouts
from accel_state.polling import until

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not listed

_GRACE_S = 3.0  # after a time-out, how long to wait for others to say that they came


def post_whereabouts(store: Store, rank: int) -> None:
    """Let others find out what has become of this process. One key in the store."""
    store.set(f"where/{rank}", whereabouts())


def post_failure(store: Store, rank: int, error: BaseException) -> None:
    """Let others find out why this rank is about to end. One key in the store."""
    store.set(f"failed/{rank}", f"{type(error).__name__}: {error}")


def fate(store: Store, rank: int) -> str | None:
    """What has become of a rank, in words, if something has: it failed, its process is gone or stopped.

    Raises:
        RuntimeError: the store is gone.
    """
    failed, where = f"failed/{rank}", f"where/{rank}"
    if store.check([failed]):
        return f"failed with {str(store.get(failed), errors='replace')}"
    state = state_of(str(store.get(where), errors="replace")) if store.check([where]) else None
    return {"gone": "has ended: its process no longer runs", "stopped": "is stopped (as by SIGSTOP)"}.get(state or "")


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether gloo's error means that a peer did not answer or went away, rather than that the work cannot be done."""
    text = str(error).lower()
    return any(words in text for words in ("gloo/transport", "timed out", "timeout", "connection"))


def raise_absent(
    store: Store, rank: int, world_size: int, *, number: int | str, text: str, limit_s: float, error: RuntimeError
) -> NoReturn:
    """Find out through the store who came to a collective, and say who did not, and why.

    Args:
        store: of the channel.
        rank: this one.
        world_size: how many there are.
        number: of the collective, or its number and kind.
        text: what was called.
        limit_s: the time-out.
        error: what gloo said.

    Raises:
        CollectiveMismatchError: always.
    """
    what = f"{text} at {call_chain()}"
    try:
        came = _roll_call(store, rank, world_size, number, what)
        absent = [other for other in range(world_size) if other not in came]
        fates = {other: fate(store, other) for other in absent}
    except RuntimeError as lost:
        raise CollectiveMismatchError(
            f"rank {rank} waited in {what}, and the store of the job (on rank 0, or with the launcher) is gone: {lost}"
        ) from error
    who = f"{ranks_text(absent)} never came" if absent else f"all ranks came, but it did not end within {limit_s:g} s"
    said = "".join(f". Rank {other} {words}" for other, words in fates.items() if words)
    raise CollectiveMismatchError(
        f"collective number {number}, {what}: {who}{said}. {ranks_text(sorted(came))} waited (time-out {limit_s:g} s). "
        f"A rank that is missing has ended, hangs, or took another branch. What gloo said: {error}"
    ) from error


def _roll_call(store: Store, rank: int, world_size: int, number: int | str, what: str) -> set[int]:
    store.set(f"late/{number}/{rank}", what)
    keys = [f"late/{number}/{other}" for other in range(world_size)]
    until(lambda: store.check(keys), _GRACE_S)
    return {other for other, key in enumerate(keys) if store.check([key])}


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2`."""
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
