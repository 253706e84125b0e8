"""The fixture that runs a function on several ranks."""

from accel_state.testing import ranks  # noqa: F401
