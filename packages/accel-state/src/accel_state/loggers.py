"""Loggers that speak once per job, or rank after rank."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any

from accel_state.errors import TopologyError
from accel_state.settings import setting
from accel_state.topology import Topology


class MultiProcessAdapter(logging.LoggerAdapter):
    """A logger that by default speaks on rank 0 only; works before any state exists.

    Each method takes, beside what a logger takes:
        main_process_only: False lets every rank speak. True by default.
        in_order: every rank speaks, one after the other. A rank that does not come is waited for a few seconds, once;
            then no longer, until it speaks from that line again.
        stacklevel: as the peer counts: 2, the default, is the caller's line, 3 the caller's caller.
    """

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log on rank 0, on all ranks, or on all ranks in order; see the class."""
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs["stacklevel"] = max(kwargs.get("stacklevel", 2), 2)
        if in_order:
            from accel_state.rank_order import in_rank_order

            with in_rank_order(f"{self.name}/{level}"):
                if self.isEnabledFor(level):
                    self._emit(level, msg, args, kwargs)
        elif self.isEnabledFor(level) and (not main_process_only or _rank() == 0):
            self._emit(level, msg, args, kwargs)

    def _emit(self, level: int, msg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs["stacklevel"] += 1  # this frame
        msg, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]
        self.logger.log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank before the message."""
        return f"[RANK {_rank()}] {msg}", kwargs

    def warning_once(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """`warning`, but the same message only once in this process."""
        said = (self.name, str(msg), repr(args))
        if said not in _SAID_ONCE:
            _SAID_ONCE.add(said)
            kwargs["stacklevel"] = max(kwargs.get("stacklevel", 2), 2) + 1
            self.warning(msg, *args, **kwargs)


_SAID_ONCE: set[tuple[str, str, str]] = set()


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger of Python's `logging`, with the manners of `MultiProcessAdapter`.

    Args:
        name: as of `logging.getLogger`; usually `__name__`.
        log_level: its level, in either case; from the settings (`ACCEL_LOG_LEVEL`) by default, else left alone.

    Raises:
        SettingError: an unknown level.
    """
    logger = logging.getLogger(name)
    level = setting("log_level", log_level)
    if level is not None:
        logger.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


def _rank() -> int:
    """Of the state if there is one, else by the launcher's variables; never makes a process group.

    Variables that are incomplete are for the state to refuse: a logger speaks nevertheless.
    """
    process_group = sys.modules.get("accel_state.process_group")
    job = None if process_group is None else process_group.known_job()
    if job is not None:
        rank: int = job.topology.rank
        return rank
    try:
        return Topology.from_env().rank
    except TopologyError:
        said = os.environ.get("RANK", "0")
        return int(said) if said.isdecimal() else 0
