"""Two processes that save to one place while a third reads: every set that is read is one that was saved."""

from __future__ import annotations

import itertools
import os
import time

import pytest
import torch
from torch import nn

from accel_ckpt import load as load_file
from accel_ckpt import load_checkpoint, read_weights, save, save_checkpoint, save_model, verify_checkpoint
from accel_state.errors import CheckpointError
from accel_testkit.faults import fork
from accel_testkit.nets import value_of

NUM_SAVES = 60 if "ACCEL_TEST_FAULTS" in os.environ else 12


def net_of(value: float) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20))
    for p in net.parameters():
        nn.init.constant_(p, value)
    return net


def save_a_checkpoint(path, value: float) -> None:
    save_checkpoint(path, {"net": net_of(value)})


def read_a_checkpoint(path) -> float:
    net = net_of(-1)
    load_checkpoint(path, {"net": net})
    return value_of(net)


def save_weights(path, value: float) -> None:
    save_model(net_of(value), path, 1000)


def read_the_weights(path) -> float:
    numbers: set[float] = set()
    read_weights(path, lambda name, tensor: numbers.update(tensor.reshape(-1).tolist()))
    (value,) = numbers
    return value


def save_an_object(path, value: float) -> None:
    save(torch.full((50, 50), value), path)


def read_the_object(path) -> float:
    (value,) = load_file(path).unique().tolist()
    return value


@pytest.mark.parametrize(
    ("write", "read"),
    [(save_a_checkpoint, read_a_checkpoint), (save_weights, read_the_weights), (save_an_object, read_the_object)],
)
def test_what_is_read_is_one_of_the_sets(tmp_path, write, read):
    target, enough = tmp_path / "c", tmp_path / "two sets were read"
    write(target, 0.0)

    def save_often(first: int) -> None:
        """Try so many times, and until one save went through and the reader has met two sets, however slow it is."""
        tries, saved = itertools.count(), False
        while (number := next(tries)) < NUM_SAVES or not saved or not enough.exists():
            try:
                write(target, float(first + number % NUM_SAVES))
                saved = True
            except CheckpointError as error:
                assert "saving to" in str(error) or "was written by another process" in str(error), error
            time.sleep(0.005)

    pids = [fork(lambda first=first: save_often(first)) for first in (100, 1000)]
    seen, ended = set(), {}
    while len(ended) < len(pids):
        try:
            seen.add(read(target))
        except CheckpointError as error:  # of a reader that was too slow for two savers without a pause
            assert "is being replaced again and again" in str(error), error
        if len(seen) > 1:
            enough.touch()
        ended |= {
            pid: status for pid in pids if pid not in ended for done, status in [os.waitpid(pid, os.WNOHANG)] if done
        }
    assert set(ended.values()) == {0}
    assert seen <= {0.0, *(float(first + number) for first in (100, 1000) for number in range(NUM_SAVES))}
    assert len(seen) > 1
    write(target, 5.0)
    assert read(target) == 5.0
    assert [path.name for path in tmp_path.rglob(".*")] == []
    if write is save_a_checkpoint:
        verify_checkpoint(target)
