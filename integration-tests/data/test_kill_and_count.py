"""Killed with -9 at a random batch and resumed on any number of ranks, an epoch still holds every sample once.

What counts is what was read up to the last committed checkpoint, and what the resumed run reads. The core tier kills a
few times; `--faults` (ACCEL_TEST_FAULTS=1) kills twenty times.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_ckpt import Checkpointer
from accel_data import PermutationSampler, prepare_data_loader
from accel_state import PartialState
from accel_state.errors import RankFailedError
from accel_state.testing import run_ranks

LENGTH, BATCH_SIZE, STEPS_PER_SAVE = 240, 5, 3
ATTEMPTS = 20 if "ACCEL_TEST_FAULTS" in os.environ else 3


def read(folder: Path, kind: str, workers: int, killed: tuple[int, int] | None) -> int:
    """Read the rest of the epoch, with a line per batch and a checkpoint every few steps; die at (rank, step)."""
    state = PartialState(cpu=True)
    torch.manual_seed(7 + state.process_index)
    data = torch.arange(LENGTH)
    order: dict[str, Any] = {
        "sequential": {},
        "shuffle": {"shuffle": True},
        "permutation": {"sampler": PermutationSampler(LENGTH, seed=7)},
    }[kind]
    loader = prepare_data_loader(DataLoader(data, batch_size=BATCH_SIZE, num_workers=workers, **order))
    checkpoints = Checkpointer(folder / "checkpoints", keep=None)
    step = checkpoints.restore(data=loader) if checkpoints.latest() else 0
    log = (folder / f"{'first' if killed else 'second'}-{state.process_index}").open("a", buffering=1)
    for batch in loader:
        kept = loader.tail.real if loader.tail is not None else len(batch)
        step += 1
        log.write(json.dumps([step, batch.tolist()[:kept]]) + "\n")
        if killed == (state.process_index, step):
            os.kill(os.getpid(), signal.SIGKILL)
        if step % STEPS_PER_SAVE == 0:
            checkpoints.save(step, data=loader)
    return loader.iteration


def seen(folder: Path, run: str, last_step: int | None = None) -> list[int]:
    lines = [json.loads(line) for path in folder.glob(f"{run}-*") for line in path.read_text().splitlines()]
    return [sample for step, samples in lines if last_step is None or step <= last_step for sample in samples]


@pytest.mark.parametrize("attempt", range(ATTEMPTS))
def test_samples_before_the_checkpoint_and_after_the_resume_are_the_epoch(attempt: int, tmp_path: Path) -> None:
    random_choice = random.Random(attempt)
    kind = ("sequential", "shuffle", "permutation")[attempt % 3]
    workers = random_choice.choice((0, 2))
    killed = (random_choice.randrange(2), random_choice.randint(1, LENGTH // (2 * BATCH_SIZE) - 1))
    with pytest.raises(RankFailedError):
        run_ranks(read, 2, tmp_path, kind, workers, killed, timeout_s=120)
    committed = Checkpointer(tmp_path / "checkpoints", keep=None).latest()
    last_step = 0 if committed is None else committed.step
    assert last_step <= killed[1]
    iterations = run_ranks(read, 1 + attempt % 3, tmp_path, kind, random_choice.choice((0, 2)), None, timeout_s=120)
    assert set(iterations) == {1}
    whole = seen(tmp_path, "first", last_step) + seen(tmp_path, "second")
    assert sorted(whole) == list(range(LENGTH)), f"{kind}, killed at {killed}, resumed after step {last_step}"
