"""`run_ranks`: run a function on n ranks, and get its values or a failing rank's traceback."""

from __future__ import annotations

import atexit
import io
import marshal
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle

from accel_state.errors import RankFailedError
from accel_state.testing import wire
from accel_state.testing.zygote import STACKS_SIGNAL

_START_S = 120  # a cold import of torch on a busy machine
_GRACE_S = 5.0  # once one rank has failed, how long the others may take to end by themselves
_OUTPUT_LIMIT = 4000  # characters of each rank's output that a failure shows
_PASSED_ON = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH", "USER")


class RankPool:
    """A process that forks ranks, started at the first use; one that saw a time-out or a kill is thrown away."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        atexit.register(self.close)

    def run(
        self,
        fn: Callable[..., Any],
        n: int,
        *args: Any,
        timeout_s: float = 60,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on n ranks that can find each other; see `run_ranks`."""
        if n < 1:
            raise ValueError(f"n={n} ranks cannot run anything; give at least 1")
        folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        try:
            with self._lock, _reserved_port() as port:
                (folder / "call").write_bytes(_pickled(fn, args, kwargs))
                environment = _environment(n, port, env or {})
                return self._run(folder, n, environment, timeout_s)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """End the forking process and everything that it started."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        process, self._process = self._process, None
        if process is None or os.getpid() != self._owner:
            return
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _run(self, folder: Path, n: int, environment: dict[str, str], timeout_s: float) -> list[Any]:
        connection = self._start()
        request = {
            "num_ranks": n,
            "folder": str(folder),
            "environment": environment,
            "working_directory": str(Path.cwd()),
            "path": sys.path,
        }
        wire.send(connection, request)
        codes: dict[int, int] = {}
        pids: list[int] = []
        try:
            pids = self._answer(connection, time.monotonic() + _START_S)["pids"]
            self._collect(connection, n, codes, time.monotonic() + timeout_s)
        except TimeoutError:
            hanging = [rank for rank in range(n) if rank not in codes]
            failed_first = any(codes.values())
            self._dump_stacks([pids[rank] for rank in hanging])
            self._kill(pids)
            raise RankFailedError(_report(folder, n, codes, None if failed_first else timeout_s)) from None
        except BaseException:
            self._kill(pids)
            raise
        if any(codes.values()) or not all((folder / f"result-{rank}").exists() for rank in range(n)):
            raise RankFailedError(_report(folder, n, codes, None))
        return [pickle.loads((folder / f"result-{rank}").read_bytes())[1] for rank in range(n)]  # noqa: S301

    def _collect(self, connection: socket.socket, n: int, codes: dict[int, int], deadline: float) -> None:
        """Wait for every rank's exit code; after a failure the others get a short time only."""
        while len(codes) < n:
            message = self._answer(connection, deadline)
            codes[message["rank"]] = message["code"]
            if message["code"]:
                deadline = min(deadline, time.monotonic() + _GRACE_S)

    def _answer(self, connection: socket.socket, deadline: float) -> dict[str, Any]:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        message = wire.receive(connection)
        if message is None:
            raise RankFailedError("the process that forks the ranks has ended; was it killed for want of memory?")
        return message

    def _start(self) -> socket.socket:
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        self.close()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "accel_state.testing.zygote", str(theirs.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self._connection = ours
        self._owner = os.getpid()
        self._answer(ours, time.monotonic() + _START_S)
        return ours

    def _dump_stacks(self, pids: list[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
        time.sleep(0.3)  # the handler writes within microseconds of being scheduled

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
        self.close()


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout_s: float = 60,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run a function in n processes that can find each other, as under torchrun.

    Args:
        fn: any function, closures too; it and what it uses of its module travel by value.
        n: how many ranks.
        args: handed to every rank.
        timeout_s: for the whole run, in seconds.
        env: more environment variables. RANK, WORLD_SIZE, MASTER_ADDR and so on are set; of the caller's own
            environment only the most general variables are kept.
        kwargs: handed to every rank.

    Returns:
        the function's values, by rank.

    Raises:
        RankFailedError: a rank raised, exited or was killed (with its traceback and output), or the time was over
            (with the stacks of the ranks that hang). No process is left behind.

    Cost: the first call imports torch, later ones fork.
    """
    return _default_pool.run(fn, n, *args, timeout_s=timeout_s, env=env, **kwargs)


_default_pool = RankPool()


class _Pickler(cloudpickle.Pickler):
    """Keeps file names in code, for tracebacks and call sites; cloudpickle replaces them."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: lambda code: (marshal.loads, (marshal.dumps(code),))},
        cloudpickle.Pickler.dispatch_table,
    )


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """By value where the function's module is not one that a rank could import (a test file)."""
    module = sys.modules.get(getattr(fn, "__module__", "") or "")
    by_value = module is not None and module.__name__ != "__main__" and not _is_installed(module)
    if module is not None and by_value:
        cloudpickle.register_pickle_by_value(module)
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump((fn, args, kwargs))
        return buffer.getvalue()
    finally:
        if module is not None and by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _is_installed(module: ModuleType) -> bool:
    package = module.__name__.partition(".")[0]
    return package in sys.stdlib_module_names or "site-packages" in (getattr(module, "__file__", None) or "")


class _reserved_port:  # noqa: N801  (a context manager, used as a function)
    """A TCP port that nobody else will be given meanwhile.

    It is bound but not listened on: with SO_REUSEADDR on both sides rank 0 can still bind and listen.
    """

    def __enter__(self) -> int:
        self._holder = socket.socket()
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("127.0.0.1", 0))
        return int(self._holder.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._holder.close()


def _environment(n: int, port: int, extra: Mapping[str, str]) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {
        **kept,
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "OMP_NUM_THREADS": "1",
        **extra,
    }


def _report(folder: Path, n: int, codes: Mapping[int, int], timeout_s: float | None) -> str:
    """What went wrong: the first rank that failed in full, what the others say in short."""
    hanging = [rank for rank in range(n) if rank not in codes]
    parts = []
    if timeout_s is not None:
        parts.append(f"not done within {timeout_s:g} s: rank {', '.join(map(str, hanging))} of {n} still ran")
    elif hanging:
        parts.append(f"rank {', '.join(map(str, hanging))} of {n} still ran {_GRACE_S:g} s after another one failed")
    for rank, code in codes.items():  # in the order in which they ended
        if code or not (folder / f"result-{rank}").exists():
            parts.append(f"---- rank {rank} of {n} {_ending(code)}\n{_traceback(folder, rank)}")
    for rank in range(n):
        for name in ("stdout", "stderr"):
            text = _text(folder / f"{name}-{rank}")
            if text:
                parts.append(f"---- {name} of rank {rank}\n{text[-_OUTPUT_LIMIT:]}")
    return "\n".join(parts)


def _ending(code: int) -> str:
    if code == 0:
        return "ended without returning from its function"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed (exit code {code})"


def _traceback(folder: Path, rank: int) -> str:
    result = folder / f"result-{rank}"
    if not result.exists():
        return "(it ended without a traceback)"
    is_fine, value = pickle.loads(result.read_bytes())  # noqa: S301  (written by our own rank)
    return "(it failed after its function had returned)" if is_fine else str(value)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
