"""Which trackers there are: classes by name, found by entry points of the group `accel.trackers`."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any, TypeAlias

from accel_state.errors import MissingExtraError, TrackerError

from .base import GeneralTracker
from .logger_type import LoggerType

GROUP = "accel.trackers"

TrackerChoice: TypeAlias = LoggerType | str | type[GeneralTracker] | GeneralTracker

logger = logging.getLogger(__name__)


def _load_entry_points() -> dict[str, type[GeneralTracker]]:
    classes = {}
    for entry in entry_points(group=GROUP):
        try:
            classes[entry.name] = entry.load()
        except Exception as error:  # noqa: BLE001  a plug-in that cannot be imported must not take the others along
            logger.warning("the tracker %r (%s) cannot be loaded: %s", entry.name, entry.value, error)
    return classes


LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = _load_entry_points()
"""Name to class of every tracker that is known here; `register_tracker_class` adds to it."""


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Makes a tracker class available under its `name`, replacing one that had it (which is logged).

    Raises:
        TrackerError: it is no subclass of `GeneralTracker`, or has no name.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise TrackerError(f"register_tracker_class takes a subclass of GeneralTracker, not {tracker_class!r}")
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or name == LoggerType.ALL:
        raise TrackerError(f'{tracker_class.__name__}.name is {name!r}: it has to be a string other than "all"')
    if LOGGER_TYPE_TO_CLASS.get(name, tracker_class) is not tracker_class:
        logger.warning("the tracker %r is now %s", name, tracker_class.__qualname__)
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def get_available_trackers() -> list[LoggerType | str]:
    """The trackers that can be used here: known, and the library that each needs is installed."""
    return [_member(name) for name, kind in LOGGER_TYPE_TO_CLASS.items() if _is_installed(kind)]


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[TrackerChoice]:
    """Checks what `log_with` names and brings it into one list without duplicates, in the order given.

    Args:
        log_with: a name or `LoggerType`, a subclass or instance of `GeneralTracker`, a list of these, or None. `"all"`
            stands for every tracker that is available here and can be combined with own ones.
        logging_dir: accepted as the peer does; a tracker that needs a directory gets a default one from `TrackerSet`.

    Raises:
        TrackerError: a name that no tracker has, or one whose class could not be loaded.
        MissingExtraError: the library that a tracker needs is not installed; the message names the extra.
    """
    del logging_dir  # nothing to check: see the docstring
    if log_with is None:
        return []
    wanted = log_with if isinstance(log_with, list | tuple | set | frozenset) else [log_with]
    chosen: list[TrackerChoice] = []
    for item in wanted:
        for tracker in get_available_trackers() if item == LoggerType.ALL else [_checked(item)]:
            if not any(tracker is other or tracker_name(tracker) == tracker_name(other) for other in chosen):
                chosen.append(tracker)
    return chosen


def tracker_name(tracker: TrackerChoice) -> str:
    """What an entry of `filter_trackers`' result is called."""
    return str(tracker) if isinstance(tracker, str) else tracker.name


def check_name(name: str, known: Iterable[str], what: str) -> None:
    """Raises TrackerError with the nearest known name when `name` is not one of them."""
    names = sorted(known)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise TrackerError(f"{what} names {name!r}, which no tracker is called{hint}; known: {', '.join(names)}")


def _checked(item: Any) -> TrackerChoice:
    if isinstance(item, GeneralTracker) or (isinstance(item, type) and issubclass(item, GeneralTracker)):
        return item
    if not isinstance(item, str):
        raise TrackerError(
            f"log_with contains {item!r} of type {type(item).__name__}: give names, LoggerType members, or subclasses "
            "or instances of GeneralTracker"
        )
    name = str(item)
    check_name(name, {*LOGGER_TYPE_TO_CLASS, *LoggerType.list()}, "log_with")
    kind = LOGGER_TYPE_TO_CLASS.get(name)
    if kind is None:
        raise TrackerError(
            f"no class is registered for the tracker {name!r} (registered: {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}): "
            "its module could not be loaded, which a warning told when accel_tracking was imported, or the installed "
            "metadata of accel-tracking is older than its code: install it again"
        )
    if not _is_installed(kind):
        raise MissingExtraError(
            f"the tracker {name!r} needs the package {kind.requires_package!r}, which is not installed: "
            f"pip install 'accel-tracking[{name}]'"
        )
    return _member(name)


def _is_installed(kind: type[GeneralTracker]) -> bool:
    return kind.requires_package is None or importlib.util.find_spec(kind.requires_package) is not None


def _member(name: str) -> LoggerType | str:
    return LoggerType(name) if name in LoggerType.list() else name
