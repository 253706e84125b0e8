"""The page on big models, block by block, and its example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).resolve().parents[2] / "docs"
BLOCKS = re.findall(r"```python\n(.*?)```", (PAGES / "big-models.md").read_text(), flags=re.DOTALL)


def run(script: Path, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_of_the_page_runs_on_its_own(block):
    exec(compile(block, "big-models.md", "exec"), {"__name__": "__main__"})


def test_the_page_has_blocks():
    assert len(BLOCKS) == 5


def test_digits_are_recognised_from_disk(tmp_path):
    printed = run(PAGES / "examples" / "big_model_inference.py", tmp_path)
    assert float(re.search(r"test accuracy ([\d.]+)%", printed).group(1)) > 95
    on_disk, whole = map(int, re.search(r"(\d+) of (\d+) kB stay on disk", printed).groups())
    assert 0 < on_disk < whole
