import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_example_runs(block):
    exec(compile(block, str(README), "exec"), {"__name__": "__main__"})


def test_readme_has_examples():
    assert len(BLOCKS) >= 2
