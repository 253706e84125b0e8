"""The README's examples, each in a process of its own that no launcher started."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(ranks: Callable[..., list[Any]], number: int) -> None:
    code = EXAMPLES[number]

    def body() -> Any:
        import os
        import warnings

        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        warnings.simplefilter("error")
        exec(compile(code, f"README.md, example {number}", "exec"), {"__name__": "__main__"})
        return Path("/proc/self/fd/2").resolve().read_text()

    assert ranks(body, 1) == [""]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4
