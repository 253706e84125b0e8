"""The README's examples run, each on its own."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_there_are_examples():
    assert len(EXAMPLES) == 5


@pytest.mark.parametrize("source", EXAMPLES)
def test_an_example_runs(source):
    exec(compile(source, str(README), "exec"), {"__name__": "example"})
