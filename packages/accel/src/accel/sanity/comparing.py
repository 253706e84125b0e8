"""A script on one process and on many: do its first updates agree? Torch-free."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_launch import Target, find_config, make_plan, resolve_config, run_plan
from accel_state.errors import LaunchError


def compare(
    script: str,
    arguments: Sequence[str],
    config_file: str | None,
    settings: Mapping[str, Any],
    num_updates: int,
    tolerance: float,
) -> int:
    """Run a script twice and print its updates side by side.

    Args:
        script: its path.
        arguments: its own.
        config_file: of the launch; None for the default one.
        settings: flags of the launch, by key.
        num_updates: how many are compared.
        tolerance: the relative difference of a loss or norm that counts as agreement.

    Returns:
        0 where all agree, 1 where one does not, else the exit code of the run that failed.

    Raises:
        LaunchError: there is no such script, or the second run would have one process as well.
    """
    if not Path(script).is_file():
        raise LaunchError(f"there is no script {script!r}")
    file = find_config(config_file, os.environ)
    with tempfile.TemporaryDirectory(prefix="accel-test-") as folder:
        runs = []
        for name, flags in (("one", {**settings, "num_processes": 1, "num_machines": 1}), ("many", settings)):
            out = Path(folder) / name
            words = (str(out), str(num_updates), script, *arguments)
            config = resolve_config(Target("accel.sanity.recording", words, is_module=True), flags, file=file)
            if name == "many" and config.value("num_processes") == 1:
                raise LaunchError("there is nothing to compare with one process: give --num-processes N")
            code = run_plan(make_plan(config))
            if code or not out.exists():
                return code or 1
            runs.append(json.loads(out.read_text(encoding="utf-8")))
        one, many = runs
        return _verdict(one, many, config.value("num_processes"), tolerance)


def _verdict(one: list[dict[str, float]], many: list[dict[str, float]], num_processes: int, tolerance: float) -> int:
    print(
        f"{'update':>6}  {'loss on 1':>12}  {f'on {num_processes}':>12}  {'norm on 1':>12}  {f'on {num_processes}':>12}"
    )
    worst = 0.0
    for number, (first, second) in enumerate(zip(one, many, strict=True), 1):
        cells = [found[key] for key in ("loss", "norm") for found in (first, second)]
        print(f"{number:6}  " + "  ".join(f"{cell:12.6g}" for cell in cells))
        worst = max(worst, _apart(*cells[:2]), _apart(*cells[2:]))
    agrees = worst <= tolerance
    print(f"{'ok' if agrees else 'FAILED'}: they differ by at most {worst:.2g}, relatively; allowed is {tolerance:g}")
    return int(not agrees)


def _apart(first: float, second: float) -> float:
    largest = max(abs(first), abs(second))
    distance = abs(first - second)
    return float("inf") if distance != distance else distance / largest if largest else 0.0
