"""Runs of `report.py`, whose files the tests read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPORT = Path(__file__).parent / "report.py"

# nobody's account, nothing sent, and nothing said about it
OFFLINE = {
    "COMET_API_KEY": "",
    "DVC_NO_ANALYTICS": "1",
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_MODE": "offline",
}


@dataclass(frozen=True)
class Reported:
    """What two runs left behind: `folder`, the run's id before and after, the class of the library's object."""

    folder: Path
    run_id: str
    library: str
    output: str


@pytest.fixture
def reported(tmp_path: Path) -> Callable[..., Reported]:
    """Runs both parts with a tracker, the second as a new process that goes on with the run."""

    def report(name: str, init_kwargs: dict[str, Any] | None = None, **variables: str) -> Reported:
        script = shutil.copy(REPORT, tmp_path)  # outside of any repository, which some libraries look for and read
        ids, lines, output = [], [], ""
        for part in ("first", "second"):
            environment = {**os.environ, **OFFLINE, **variables, "HOME": str(tmp_path), "PYTHONWARNINGS": "ignore"}
            done = subprocess.run(
                [sys.executable, script, name, str(tmp_path), part, json.dumps(init_kwargs or {})],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=480,
                check=False,
            )
            output += done.stdout + done.stderr
            assert done.returncode == 0, output
            ids.append(json.loads((tmp_path / "state.json").read_text())["run_ids"][name])
            lines.append(done.stdout.splitlines())
        assert ids[0] == ids[1]
        library = next(line for line in reversed(lines[0]) if "." in line and " " not in line)
        return Reported(tmp_path, ids[0], library, output)

    return report
