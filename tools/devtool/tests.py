"""``tools/dev test``: pytest over packages and integration tests, by tiers."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from devtool.paths import BIN, PYTHON, ROOT, DevError, become, must_run, packages, say
from devtool.tiers import TIERS, marker_expression

OTHER_TARGETS = ("integration-tests", "tools")


def targets() -> list[str]:
    """What can be named on the command line."""
    return [*packages(), *OTHER_TARGETS]


def run_tests(names: list[str], tiers: list[str], pytest_arguments: list[str]) -> int:
    """Run the core tier and the chosen ones for all or the named targets; does not return but for an error."""
    filled = filled_tiers()
    empty = [name for name in tiers if name not in filled]
    if empty:
        raise DevError(f"there is no test yet in the tier(s) {', '.join(empty)}; there are some in: {_listed(filled)}")
    left_out = [name for name in TIERS if name not in tiers]
    if left_out:
        texts = [name if name in filled else f"{name} (empty yet)" for name in left_out]
        say(f"core tier{''.join(f' + {name}' for name in tiers)}; left out: {', '.join(texts)}")
    if "isolated" in tiers:
        wanted = [name for name in names if name in packages()]
        must_run([PYTHON, ROOT / "tools" / "dev", "isolated", *wanted])
    if "engines" in tiers:
        must_run([PYTHON, ROOT / "tools" / "dev", "engines", *names])
    if "clients" in tiers:
        must_run([PYTHON, ROOT / "tools" / "dev", "clients"])
    folders = [name if name in OTHER_TARGETS else f"packages/{name}/tests" for name in names]
    command = [*pytest_command(), "-m", marker_expression(tiers), *folders, *pytest_arguments]
    environment = test_environment(tiers)
    if "cluster" in tiers:
        from devtool.engines import ray_environment

        environment["ACCEL_TEST_RAY_PYTHON"] = str(ray_environment())
    become(command, env=environment)


def pytest_command() -> list[str]:
    """pytest over as many workers as there are cores, at most eight (each may start ranks of its own)."""
    workers = min(_usable_cores(), 8)
    return [str(BIN / "pytest"), "-n", str(workers), "--dist", "worksteal"]


def test_environment(tiers: Sequence[str] = ()) -> dict[str, str]:
    """One thread per process, since workers fill the cores; none of the shell's settings for training runs.

    Tests start hundreds of processes, so bytecode is written even where the shell says that it should not be: compiling
    everything anew in each would cost more than the tests. ``ACCEL_TEST_FAULTS`` and the like tell tests that run a
    sample in the core tier to run the whole.
    """
    dropped = ("ACCEL_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    environment.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    environment.update({f"ACCEL_TEST_{tier.upper()}": "1" for tier in tiers})
    return environment


def filled_tiers() -> list[str]:
    """The tiers that add at least one test, by its marker, or make one do more, by its variable."""
    found = {"isolated", "clients"}
    for folder in ("packages", *OTHER_TARGETS):
        for path in (ROOT / folder).rglob("test_*.py"):
            found.update(name.lower() for name in re.findall(r"\b(?:mark\.|ACCEL_TEST_)(\w+)", path.read_text()))
    return [name for name in TIERS if name in found]


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"
