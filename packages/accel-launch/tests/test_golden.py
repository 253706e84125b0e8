"""Configuration files of each kind that the peer writes, as plans that a reader can judge: `golden/*.yaml` and `.txt`.

`ACCEL_TEST_WRITE_GOLDEN=1` writes the texts anew; look at what changed.
"""

import os
import sys
from pathlib import Path

import pytest

from accel_launch import Target, make_plan, read_config, resolve_config
from accel_state.errors import AccelError

FOLDER = Path(__file__).parent / "golden"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_file_is_planned_as_ever(path, monkeypatch):
    monkeypatch.chdir(FOLDER)
    file = read_config(Path(path.name))
    try:
        target = Target("train", is_module=True)
        config = resolve_config(target, {}, file=file, environ={}, count=lambda kind, environ: 8, platform="linux")
        text = make_plan(config, environ={}, mpi=lambda: "openmpi").as_text().replace(sys.executable, "python")
    except AccelError as error:
        text = f"refused: {error}"
    golden = path.with_suffix(".txt")
    if os.environ.get("ACCEL_TEST_WRITE_GOLDEN"):
        golden.write_text(f"{text}\n", encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8").rstrip("\n")
