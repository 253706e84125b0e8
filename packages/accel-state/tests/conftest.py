"""Fixtures of this package's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel_state.testing import ranks  # noqa: F401  (a fixture)


@pytest.fixture
def fresh_state() -> Iterator[None]:
    """No state before the test, none after it."""
    from accel_state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
