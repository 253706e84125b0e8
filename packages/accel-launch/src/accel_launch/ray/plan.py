"""What Ray is asked for, as a value."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_state.errors import LaunchError

if TYPE_CHECKING:
    from accel_launch.config import LaunchConfig


def require_ray() -> None:
    """Refuse to go on without Ray.

    Raises:
        LaunchError: it is not installed.
    """
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise LaunchError("--launcher ray needs Ray, which is not installed: pip install 'accel-launch[ray]'")


def agent_command(config: LaunchConfig, script: tuple[str, ...], variables: Mapping[str, str]) -> tuple[str, ...]:
    """The command of the process that talks to Ray."""
    wanted = json.dumps({**request(config), "environment": dict(variables)})
    return (sys.executable, "-m", "accel_launch.ray.agent", wanted, *script)


def request(config: LaunchConfig) -> dict[str, Any]:
    """Which resources are reserved, in bundles that each lie on one machine.

    Where machines were asked for, each has a bundle with its part of the ranks. Else each rank has one of its own, and
    Ray puts as many as it can on one machine. `gpus_per_rank` counts where the cluster has any, or `needs_gpus`.
    """
    num_processes, num_machines = config.value("num_processes"), config.value("num_machines")
    return {
        "num_bundles": num_machines if num_machines > 1 else num_processes,
        "ranks_per_bundle": num_processes // num_machines if num_machines > 1 else 1,
        "strategy": "STRICT_SPREAD" if num_machines > 1 else "PACK",
        "cpus_per_rank": config.value("num_cpu_threads_per_process") or 1,
        "gpus_per_rank": 0 if config.value("cpu") else 1,
        "needs_gpus": config.value("multi_gpu"),
        "port": config.value("main_process_port") or None,
        "grace_s": config.value("grace_s"),
    }


def describe(config: LaunchConfig) -> str:
    """The request in words."""
    wanted = request(config)
    each = f"{wanted['cpus_per_rank']} CPU" + (" and, where Ray has any, 1 GPU" if wanted["gpus_per_rank"] else "")
    where = f"{wanted['ranks_per_bundle']} on each of {wanted['num_bundles']} machines"
    packed = "on as few machines as Ray can"
    return f"each with {each}, {where if wanted['strategy'] == 'STRICT_SPREAD' else packed}"
