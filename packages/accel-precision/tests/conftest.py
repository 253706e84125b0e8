import pytest
import torch

from accel_state.testing import ranks  # noqa: F401 - a fixture


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
