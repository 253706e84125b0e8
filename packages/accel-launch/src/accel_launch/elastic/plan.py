"""What torch elastic is asked for, as a value."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from accel_state.errors import LaunchError

if TYPE_CHECKING:
    from accel_launch.config import LaunchConfig

SHIM = (
    'echo $$ >"$_ACCEL_GUARD"; '
    'eval "set -- \\"\\$_ACCEL_OUT_$LOCAL_RANK\\" \\"\\$_ACCEL_ERR_$LOCAL_RANK\\" \\"\\$@\\""; '
    'o=$1 e=$2; shift 2; exec "$@" >"$o" 2>"$e"'
)
"""Around each rank: it lists itself with the guard, takes streams of its own, and becomes the rank's program."""


def agent_command(config: LaunchConfig, script: tuple[str, ...]) -> tuple[str, ...]:
    """The command of this machine's agent."""
    wanted = json.dumps(request(config))
    return (sys.executable, "-m", "accel_launch.elastic.agent", wanted, "/bin/sh", "-c", SHIM, "rank", *script)


def request(config: LaunchConfig) -> dict[str, Any]:
    """The arguments of torch's `LaunchConfig`, as plain values."""
    num_machines, backend = config.value("num_machines"), config.value("rdzv_backend")
    address = config.value("main_process_ip") or "127.0.0.1"
    port = config.value("main_process_port") or 0
    configs: dict[str, Any] = _rendezvous_options(config.value("rdzv_conf"))
    if backend == "static":
        configs.setdefault("rank", config.value("machine_rank"))
        configs.setdefault("timeout", 900)
        port = port or _free_port(address)
    elif num_machines == 1 or (backend == "c10d" and config.settings["machine_rank"].origin != "default"):
        configs.setdefault("is_host", config.value("machine_rank") == 0)
    return {
        "min_nodes": config.value("min_machines") or num_machines,
        "max_nodes": num_machines,
        "nproc_per_node": config.value("num_processes") // num_machines,
        "run_id": config.value("rdzv_id") or "none",
        "role": config.value("role"),
        "rdzv_endpoint": f"{address}:{port}",
        "rdzv_backend": backend,
        "rdzv_configs": configs,
        "max_restarts": config.value("max_restarts"),
        "monitor_interval": config.value("monitor_interval"),
        "local_addr": address if address.startswith("127.") or address == "localhost" else None,
        "shutdown_timeout": max(1, config.value("grace_s")),
    }


def _free_port(address: str) -> int:
    import socket

    with socket.create_server((address, 0)) as found:
        port: int = found.getsockname()[1]
        return port


def _rendezvous_options(text: str | None) -> dict[str, str]:
    options = {}
    for part in (text or "").split(","):
        key, equals, value = part.partition("=")
        if part.strip() and not (equals and key.strip() and value.strip()):
            raise LaunchError(f"--rdzv-conf {text}: {part!r} is not allowed; give key=value,key=value")
        if part.strip():
            options[key.strip()] = value.strip()
    return options
