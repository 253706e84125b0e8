"""What the umbrella's tests share."""

from __future__ import annotations

import pytest

from accel_state import AcceleratorState
from accel_state.testing import ranks  # noqa: F401  a fixture


@pytest.fixture(autouse=True)
def _fresh_state():
    """Each test begins without a current Accelerator and without a process state."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
