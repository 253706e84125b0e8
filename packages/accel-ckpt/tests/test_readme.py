"""The README's examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_example(tmp_path, monkeypatch, block):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(README), "exec", dont_inherit=True), {"__name__": "readme"})


def test_there_are_examples():
    assert len(BLOCKS) >= 3
