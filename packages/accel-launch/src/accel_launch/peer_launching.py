"""Names of the peer's launcher that other code imports."""

from __future__ import annotations

import argparse
import os
from typing import Final

TORCH_LAUNCH_PARAMS: Final = [
    *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"),
    *("max_restarts", "monitor_interval", "start_method", "role", "module", "m", "no_python", "run_path", "log_dir"),
    *("r", "redirects", "t", "tee", "node_rank", "master_addr", "master_port"),
]
"""Arguments of torchrun by which the peer tells them from its own."""


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command and the whole environment of a launch of one process.

    Args:
        args: as `launch_command_parser()` parses them.

    Raises:
        LaunchError, SettingError: the request cannot be met.
    """
    from accel_launch import flags
    from accel_launch.config import Target, resolve_config
    from accel_launch.plan import make_plan

    target = Target(args.training_script, tuple(args.training_script_args), bool(args.module), bool(args.no_python))
    (rank,) = make_plan(resolve_config(target, {**flags.given_flags(args), "num_processes": 1})).ranks
    return list(rank.command), {**os.environ, **rank.environment}


def test_launch() -> None:
    """Raise where this process cannot find its place and device, and the others where there are any."""
    from accel_state import PartialState

    PartialState()


test_launch.__test__ = False  # type: ignore[attr-defined]  # the peer's name for it, no test of ours
