"""Stopped at any update and resumed in other processes: the same weights, bit for bit; on other ranks the same run.

A sample in the core tier, all combinations by --faults.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from pathlib import Path

import pytest
import torch

from accel_state.testing import ranks  # noqa: F401  a fixture

sys.path.insert(0, str(Path(__file__).parent))
from resume import GLOBAL_BATCH, NUM_SAMPLES, UPDATES, train

FULL = "ACCEL_TEST_FAULTS" in os.environ
WORLD = {"single": 1, "ddp": 2, "fully_shard": 2}
MATRIX = list(
    itertools.product(["digits", "transformer"], ["single", "ddp", "fully_shard"], ["no", "bf16", "fp16"], [1, 2])
)
SAMPLE = [
    ("digits", "single", "fp16", 2),
    ("digits", "ddp", "bf16", 1),
    ("transformer", "fully_shard", "no", 2),
    ("transformer", "fully_shard", "fp16", 1),
]
CROSSINGS = [
    ("ddp", 2, "single", 1),
    ("fully_shard", 2, "single", 1),
    ("single", 1, "fully_shard", 2),
    ("ddp", 3, "fully_shard", 2),
]


@pytest.mark.parametrize(("net", "strategy", "precision", "accumulation"), MATRIX if FULL else SAMPLE)
def test_resumed_bit_for_bit(tmp_path, ranks, net, strategy, precision, accumulation):  # noqa: F811
    stop = random.Random(f"{net}{strategy}{precision}{accumulation}").randrange(1, UPDATES - 2)
    run = (tmp_path, net, strategy, precision, accumulation)
    world = WORLD[strategy]
    expected, used = ranks(lambda: train(*run), world)[0]
    ranks(lambda: train(*run, stop_after=stop), world)
    resumed, used_after = ranks(lambda: train(*run, seed=99, resume=True), world)[0]
    assert resumed == expected
    assert used_after == used[stop:]


@pytest.mark.parametrize(("before", "world", "after", "other_world"), CROSSINGS if FULL else CROSSINGS[1:3])
@pytest.mark.parametrize("precision", ["no", "bf16"] if FULL else ["no"])
def test_resumed_on_other_ranks(tmp_path, ranks, before, world, after, other_world, precision):  # noqa: F811
    """fp32 within 1e-5 of the undisturbed run, bf16 within 3e-2; each epoch uses each sample once."""
    stop = 5  # in the middle of an epoch
    run = {"net": "transformer", "precision": precision, "accumulation": 1, "deterministic": True}
    expected, used = ranks(lambda: train(tmp_path, strategy=before, **run), world)[0]
    ranks(lambda: train(tmp_path, strategy=before, **run, stop_after=stop), world)
    resumed, used_after = ranks(lambda: train(tmp_path, strategy=after, **run, seed=99, resume=True), other_world)[0]
    tolerance = 1e-5 if precision == "no" else 3e-2
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(resumed[name]), torch.tensor(values), rtol=0, atol=tolerance)
    whole_epochs = [sample for update in used[:stop] + used_after for sample in update]
    per_epoch = NUM_SAMPLES
    for start in range(0, len(whole_epochs) - per_epoch + 1, per_epoch):
        assert sorted(whole_epochs[start : start + per_epoch]) == list(range(per_epoch))
    assert len(whole_epochs) >= UPDATES * GLOBAL_BATCH
