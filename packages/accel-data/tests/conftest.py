from accel_state.testing import ranks  # noqa: F401
