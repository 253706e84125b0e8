"""Small functions that scripts written for the peer import, with the peer's names; torch-free."""

from __future__ import annotations

import functools
import logging
import platform
import re
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from accel_state.availability import is_deepspeed_available, is_torchao_available
from accel_state.errors import MissingExtraError
from accel_state.settings import setting

DEFAULT_PORT = 29500  # torchrun's
_OLDEST_GOOD_KERNEL = (5, 5)


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Take anything and do nothing: what a function for one rank becomes on the others."""


class ThreadLocalSharedDict(threading.local):
    """A class attribute whose dict is one per thread, shared by all instances; assigning replaces this thread's dict.

    Args:
        thread_local: the peer's argument; the dict is one per thread in either case.
    """

    def __init__(self, thread_local: bool = False) -> None:
        del thread_local
        self._storage: dict[str, Any] = {}

    def __get__(self, instance: Any, owner: type | None = None) -> dict[str, Any]:
        return self._storage

    def __set__(self, instance: Any, value: dict[str, Any]) -> None:
        self._storage = value


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Those of some modules that this process has imported already."""
    return [name for name in library_names if name in sys.modules]


def convert_bytes(size: float) -> str:
    """A number of bytes for people: `1.5 MB`, in steps of 1024."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if abs(size) < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def get_pretty_name(obj: Any) -> str:
    """The qualified name of a class or function; of anything else, that of its class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def recursive_getattr(obj: Any, attr: str) -> Any:
    """`getattr` that follows dots: `recursive_getattr(model, "encoder.layer.weight")`."""
    return functools.reduce(getattr, attr.split("."), obj)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Put the items of `source` into `destination`, dicts within dicts too; returns `destination`."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def is_port_in_use(port: int | str | None = None) -> bool:
    """Whether a process on this machine listens on a TCP port.

    Args:
        port: the number; by default the one that ranks would meet at, by the settings, else 29500.
    """
    number = int(port or setting("main_process_port") or DEFAULT_PORT)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", number)) == 0


def check_os_kernel() -> None:
    """Warn on Linux kernels below 5.5, with which processes may hang; once per call, by this module's logger."""
    release = platform.uname()
    found = re.match(r"(\d+)\.(\d+)", release.release)
    if release.system != "Linux" or found is None:
        return
    if (int(found[1]), int(found[2])) < _OLDEST_GOOD_KERNEL:
        logging.getLogger(__name__).warning(
            "this machine runs Linux %s; below 5.5 processes of a job can hang. Upgrade if yours do", release.release
        )


def deepspeed_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: calling the function without DeepSpeed raises ImportError that names it."""
    return _requires("deepspeed", is_deepspeed_available, func)


def torchao_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: calling the function without torchao raises ImportError that names it."""
    return _requires("torchao", is_torchao_available, func)


def _requires(library: str, is_available: Callable[[], bool], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_available():
            raise MissingExtraError(
                f"{get_pretty_name(function)} needs {library}, which is not installed: `pip install {library}`"
            )
        return function(*args, **kwargs)

    return run
