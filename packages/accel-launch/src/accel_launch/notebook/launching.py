"""`notebook_launcher` and `debug_launcher`: ranks that run a function of the calling program, by torch elastic."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accel_launch.notebook.checks import check_can_fork
from accel_launch.notebook.ranks import call_recorded
from accel_state.device_count import count_devices
from accel_state.errors import LaunchError
from accel_state.settings import find_setting


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    start_method: str = "fork",
) -> None:
    """Run a function in several processes from a notebook, and wait for them.

    Without an accelerator, or with one process, it is called here. The `Accelerator` has to be made inside the
    function.

    Args:
        function: what each process runs.
        args: its arguments.
        num_processes: how many on this machine; one for each GPU by default.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        use_port: TCP port that they meet at.
        master_addr: host of machine 0.
        node_rank: this machine's number.
        num_nodes: machines in all.
        rdzv_backend: how machines find each other, "static" or "c10d".
        rdzv_endpoint: where, `HOST:PORT`; `master_addr:use_port` by default.
        rdzv_conf: more for that rendezvous.
        rdzv_id: the job's name there.
        max_restarts: how often all processes are started again after one failed.
        monitor_interval: seconds between looks at them.
        log_line_prefix_template: torch's, for the lines that they print.
        start_method: "fork", which knows every function of the notebook, or "spawn", which also works after the device
            was touched, with functions from modules.

    Raises:
        LaunchError: a device was touched before a fork, or the request contradicts itself.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a process failed; holds its traceback.
    """
    if start_method not in ("fork", "spawn"):
        raise LaunchError(f"start_method={start_method!r} is not allowed; give 'fork' or 'spawn'")
    if not 0 <= node_rank < num_nodes:
        raise LaunchError(f"node_rank={node_rank} contradicts num_nodes={num_nodes}: it is from 0 to {num_nodes - 1}")
    precision = find_setting("mixed_precision").parse(str(mixed_precision), "argument")
    num_gpus = count_devices("cuda")
    num_processes = num_processes or max(1, num_gpus)
    variables = {"ACCELERATE_MIXED_PRECISION": precision, "ACCEL_MIXED_PRECISION": precision}
    if num_processes == 1 and num_nodes == 1:
        with _environment(variables):
            function(*args)
        return
    if start_method == "fork":
        check_can_fork()
    _check_no_accelerator()
    variables |= {"FORK_LAUNCHED": "1", **({} if num_gpus else {"ACCEL_USE_CPU": "true", "ACCELERATE_USE_CPU": "true"})}
    request = {
        "min_nodes": num_nodes,
        "max_nodes": num_nodes,
        "nproc_per_node": num_processes,
        "run_id": rdzv_id,
        "rdzv_endpoint": rdzv_endpoint or f"{master_addr}:{use_port}",
        "rdzv_backend": rdzv_backend,
        "rdzv_configs": ({"rank": node_rank} if rdzv_backend == "static" else {}) | (rdzv_conf or {}),
        "max_restarts": max_restarts,
        "monitor_interval": monitor_interval,
        "start_method": start_method,
        "log_line_prefix_template": log_line_prefix_template,
        "local_addr": master_addr if master_addr in ("127.0.0.1", "localhost") else None,
    }
    with _environment(variables):
        _elastic(request, function, args)


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> None:
    """Run a function in several forked processes on the CPU, which find each other through a free port.

    Args:
        function: what each process runs.
        args: its arguments.
        num_processes: how many.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a process failed; holds its traceback.
    """
    request = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": num_processes,
        "run_id": "debug",
        "rdzv_endpoint": "127.0.0.1:0",
        "rdzv_backend": "c10d",
        "rdzv_configs": {"is_host": True},
        "max_restarts": 0,
        "start_method": "fork",
        "local_addr": "127.0.0.1",
    }
    words = {"ACCEL_USE_CPU": "true", "ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    with _environment({**words, "ACCEL_MIXED_PRECISION": "no"}):
        _elastic(request, function, args)


def _elastic(request: Mapping[str, Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # as in `elastic.agent`: a restarted rank must not meet the store of the dead attempt
    with _environment({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}):
        elastic_launch(LaunchConfig(**request, logs_specs=DefaultLogsSpecs()), call_recorded)(function, *args)


def _check_no_accelerator() -> None:
    """An `Accelerator` of this process would be copied into each rank, as the only one."""
    state = sys.modules.get("accel_state")
    if state is not None and "torch" in sys.modules and state.PartialState._shared_state:  # noqa: SLF001  as in the peer
        raise LaunchError(
            "an Accelerator or PartialState was made before notebook_launcher was called: restart the notebook and "
            "make it inside the launched function only"
        )


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
