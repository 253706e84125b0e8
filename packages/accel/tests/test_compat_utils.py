"""What `accel.utils` adds to the packages' own names."""

from __future__ import annotations

from accel.utils import tqdm
from accel_state.testing import run_ranks


def _hidden() -> list[bool]:
    bars = tqdm(range(2)), tqdm(range(2), main_process_only=False), tqdm(range(2), disable=True)
    hidden = [bar.disable for bar in bars]  # closing a bar disables it
    for bar in bars:
        bar.close()
    return hidden


def test_one_process_of_the_machine_shows_the_bar() -> None:
    assert run_ranks(_hidden, 2) == [[False, False, True], [True, False, True]]
