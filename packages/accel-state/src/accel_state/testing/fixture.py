"""The pytest fixture `ranks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from accel_state.testing.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """`ranks(fn, n, *args, timeout_s=60, env=None, **kwargs)`: as `run_ranks`, with one pool for the session."""
    pool = RankPool()
    yield pool.run
    pool.close()
