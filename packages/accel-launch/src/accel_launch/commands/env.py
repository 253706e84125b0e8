"""`accel env`: what a bug report needs, without importing torch."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from accel_launch.parser import CommandParser
from accel_state.device_count import count_devices
from accel_state.errors import AccelError
from accel_state.settings import all_settings, resolve, unknown_variables
from accel_state.topology import Topology

PACKAGES = (
    "accel",
    "accel-state",
    "accel-data",
    "accel-precision",
    "accel-parallel",
    "accel-ckpt",
    "accel-tracking",
    "accel-launch",
    "torch",
    "numpy",
    "safetensors",
)
# Variables of others that change what a run does; shown when they are set.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT")


def register(subparsers: Any) -> None:
    """Add `env` to the `accel` command."""
    env_command_parser(subparsers)


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accel env`, alone or as a subcommand of `subparsers`."""
    description = "Print versions, devices and settings with their origin, for bug reports."
    parser = CommandParser.as_command(subparsers, "env", "print what a bug report needs", description=description)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--config-file", "--config_file", default=None, metavar="PATH", help="as of accel launch")
    parser.set_defaults(func=env_command)
    return parser


def env_command(args: argparse.Namespace) -> None:
    """Print the report."""
    found = report(args.config_file)
    if args.json:
        import json

        print(json.dumps(found, indent=2))
        return
    for title, rows in found.items():
        print(title)
        for name, value in rows.items() if isinstance(rows, dict) else enumerate(rows, 1):
            print(
                f"  {name}: {value['value']}  ({value['origin']})" if isinstance(value, dict) else f"  {name}: {value}"
            )


def report(config_file: str | None = None) -> dict[str, Any]:
    """Everything that `accel env` prints, as plain values. A setting or variable that is wrong is shown as such.

    Args:
        config_file: the configuration file that is shown; the one that `accel launch` would find by default.
    """
    import platform  # here, and the metadata reader below: slow to import, and `accel --help` imports this module

    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "machine": {
            "platform": platform.platform(),
            "python": sys.executable,
            "cpu cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "devices": {kind: count_devices(kind) for kind in ("cuda", "mps")},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "configuration file": _configuration(config_file),
        "process": _topology(),
        "settings": {row.key: _resolved(row.key) for row in all_settings()},
        "warnings": unknown_variables(),
    }


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _configuration(path: str | None) -> dict[str, Any]:
    from accel_launch.files import find_config

    try:
        file = find_config(path, os.environ)
    except AccelError as error:
        return {"error": str(error)}
    return {"path": file.path or "none", **file.values}


def _topology() -> dict[str, Any]:
    try:
        return Topology.from_env()._asdict()
    except AccelError as error:
        return {"error": str(error)}


def _resolved(key: str) -> dict[str, Any]:
    try:
        return resolve(key)._asdict()
    except AccelError as error:
        return {"value": None, "origin": f"error: {error}"}
