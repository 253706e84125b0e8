"""Private copies: memory that is used again, and that a forked child has no part in."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from accel_ckpt.buffers import CopyBuffers
from accel_testkit.faults import fork


def state_of(value: float, size: int = 1000):
    return {"a": {"x": torch.full((size,), value), "y": torch.full((3,), value, dtype=torch.float64)}, "b": {}}


def test_the_next_copy_takes_the_same_memory():
    buffers = CopyBuffers()
    first = buffers.private(state_of(1))["a"]["x"]
    place = first.data_ptr()
    assert first.eq(1).all()
    again = buffers.private(state_of(2))["a"]
    assert again["x"].data_ptr() == place
    assert again["x"].eq(2).all()
    assert again["y"].eq(2).all()


def test_another_form_takes_other_memory():
    buffers = CopyBuffers()
    buffers.private(state_of(1))
    assert buffers.private(state_of(2, size=5000))["a"]["x"].tolist() == [2.0] * 5000


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_child_that_copies_leaves_the_parents_copy_alone():
    buffers = CopyBuffers()
    copies = buffers.private(state_of(1))

    def child() -> None:
        assert buffers.private(state_of(2))["a"]["x"].eq(2).all()

    _, status = os.waitpid(fork(child), 0)
    assert status == 0
    assert copies["a"]["x"].eq(1).all()
    assert copies["a"]["y"].eq(1).all()
