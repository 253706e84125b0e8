"""The main functions behind `python -m accelerate.commands.…`."""

from __future__ import annotations

import sys


def main() -> int:
    """`accelerate …`."""
    return _run()


def launch_main() -> int:
    """`accelerate launch …`."""
    return _run("launch")


def env_main() -> int:
    """`accelerate env …`."""
    return _run("env")


def _run(*command: str) -> int:
    import accel_launch

    return accel_launch.main([*command, *sys.argv[1:]])
