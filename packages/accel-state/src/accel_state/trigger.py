"""A flag that any rank can raise for all of them."""

from __future__ import annotations

from accel_state.collectives.operations import any_rank


class Trigger:
    """Set on any one rank, seen by all at the next check; no barrier is needed between.

    One object per purpose; all ranks check it equally often.
    """

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Make the next `check` true on every rank. Costs nothing."""
        self._is_set = True

    def check(self) -> bool:
        """Whether any rank called `set` since the last check; every rank has to come.

        Raises:
            CollectiveMismatchError: a rank did not come, or called something else.

        Cost: an exchange of slots on the CPU; no device is waited for.
        """
        mine, self._is_set = self._is_set, False
        return any_rank(mine)
