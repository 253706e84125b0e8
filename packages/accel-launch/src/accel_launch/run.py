"""From a plan to running processes: picks the engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from accel_launch import deepspeed
from accel_launch.config import Target, resolve_config
from accel_launch.plan import Ending, LaunchPlan, make_plan
from accel_launch.ray.plan import require_ray
from accel_state.errors import LaunchError
from accel_state.settings import find_setting


def run_plan(plan: LaunchPlan) -> int:
    """Start the processes of a plan and wait for them; has to be called on the main thread.

    Returns:
        0 when all ended well, else the exit code of the rank that failed first, 128 + n where signal n ended it.

    Raises:
        LaunchError: the port is taken, the command cannot be started, or what it needs is not installed.
    """
    return _run(plan, keeps_words=False).code


def _run(plan: LaunchPlan, keeps_words: bool) -> Ending:
    if os.name == "nt":
        return Ending(_run_one(plan), "")
    from accel_launch.spawn.supervisor import supervise

    if plan.config.value("launcher") == "ray":
        require_ray()
    if plan.env_file is None:
        return supervise(plan, keeps_words)
    deepspeed.require_deepspeed()
    with deepspeed.written(plan.env_file, Path.cwd()):
        return supervise(plan, keeps_words)


def launch(script: str, *arguments: str, module: bool = False, no_python: bool = False, **settings: Any) -> None:
    """Run a script in several processes, as `accel launch` does, and wait for them.

    Args:
        script: its path; a module's name or a program's, with `module` or `no_python`.
        arguments: what the script finds in `sys.argv[1:]`.
        module: run it as `python -m` does.
        no_python: run it without Python in front.
        settings: as the flags of `accel launch`, by key: `num_processes=2, cpu=True`.

    Raises:
        SettingError: an unknown setting or a value that is not allowed.
        LaunchError: it cannot be started, or a process failed: with the traceback of the one that failed first.
    """
    for key in settings:
        find_setting(key)
    target = Target(script, arguments, module, no_python)
    ended = _run(make_plan(resolve_config(target, settings)), keeps_words=True)
    if ended.code:
        why = f":\n{ended.words}" if ended.words else "; its output above says why"
        raise LaunchError(f"{script} failed with exit code {ended.code}{why}")


def _run_one(plan: LaunchPlan) -> int:
    """Windows: one process, which the console itself sends Ctrl-C to."""
    import subprocess

    (rank,) = plan.ranks
    environment = {name: text for name, text in os.environ.items() if name not in plan.removed}
    try:
        return subprocess.run(rank.command, env={**environment, **rank.environment}, check=False).returncode
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"accel launch: {rank.command[0]} cannot be started: {error}", file=sys.stderr)
        return 2
