from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel_state.testing import ranks  # noqa: F401  (a fixture)
from accel_state.topology import Topology


@pytest.fixture
def rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process looks like rank 1 of 2, as a launcher's variables would say."""
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    assert Topology.from_env().rank == 1


@pytest.fixture
def read_lines():
    """Reads a file of JSON lines, strictly: what JSON does not have is an error."""

    def refuse(text: str) -> Any:
        raise AssertionError(f"{text} is not JSON")

    def read(path: Path) -> list[dict[str, Any]]:
        return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]

    return read
