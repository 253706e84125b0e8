"""The process that imports torch once and forks ranks on request: `python -m accel_state.testing.zygote FD`.

It has one thread and no process group, so that its forks are as good as fresh processes. When the test process goes,
the socket ends, and it kills what it started; when it is killed itself, the kernel kills its children.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from accel_state.testing import wire

STACKS_SIGNAL = signal.SIGUSR2  # makes a rank write the stacks of its threads to its stderr


def serve(connection: socket.socket) -> None:
    """Fork ranks as asked until the other side is gone."""
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    os.set_blocking(wakeup_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing would be written to the pipe
    signal.set_wakeup_fd(wakeup_write)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process, which then ends this one
    running: dict[int, int] = {}
    while True:
        sources: list[Any] = [connection, wakeup_read]
        ready, _, _ = select.select(sources, [], [])
        if wakeup_read in ready:
            os.read(wakeup_read, 4096)
            _reap(running, connection)
        if connection in ready:
            request = wire.receive(connection)
            if request is None:
                for pid in running:
                    _kill_group(pid)
                return
            for rank in range(request["num_ranks"]):
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for descriptor in (wakeup_read, wakeup_write, connection.fileno()):
                        os.close(descriptor)
                    _become_rank(rank, request)
                running[pid] = rank
            wire.send(connection, {"pids": list(running)})


def _reap(running: dict[int, int], connection: socket.socket) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        rank = running.pop(pid)
        _kill_group(pid)  # what the rank has started and left behind
        wire.send(connection, {"rank": rank, "code": os.waitstatus_to_exitcode(status)})


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # nobody is left


def _become_rank(rank: int, request: dict[str, Any]) -> None:
    """Run the function in this fork, and end it."""
    code = 1
    try:
        _settle(rank, request)
        from accel_state.testing.rank import run

        code = run(Path(request["folder"]), rank)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _settle(rank: int, request: dict[str, Any]) -> None:
    """Make the fork look like a process that a launcher started."""
    os.setpgid(0, 0)
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{request['folder']}/{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    os.environ.clear()
    os.environ.update(request["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(request["working_directory"])
    sys.path[:] = request["path"]


def die_with_parent() -> None:
    """Let the kernel end this process when its parent ends; only Linux can, elsewhere the closed socket has to do."""
    if sys.platform == "linux":
        import ctypes

        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def main() -> None:
    """Import what ranks need, then serve."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    import torch._dynamo  # which the first optimizer of each rank would import, for seconds
    import torch.distributed
    from torch.nn import parallel  # noqa: F401  (imported for the forks)

    import accel_state.accelerator_state
    import accel_state.loggers
    import accel_state.rng
    import accel_state.testing.rank  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # keeps the forks' garbage collections from copying shared pages
    wire.send(connection, {"ready": os.getpid()})
    serve(connection)


if __name__ == "__main__":
    main()
