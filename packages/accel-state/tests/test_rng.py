"""Seeds, and random state that is saved, restored and shared."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state import (
    PartialState,
    capture_rng_state,
    current_seed,
    restore_rng_state,
    seed_for_rank,
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)
from accel_state.errors import DeviceError

Ranks = Callable[..., list[Any]]


def draw() -> tuple[float, float, list[float]]:
    return random.random(), float(np.random.rand()), torch.rand(2).tolist()  # noqa: NPY002  (the global generator)


@pytest.fixture(autouse=True)
def untouched_generators() -> Iterator[None]:
    state = capture_rng_state()
    yield
    restore_rng_state(state)


@pytest.mark.parametrize("seed", [0, 42, 2**40, 2**64 - 1, np.int64(5)])
def test_set_seed_repeats_all_draws(seed: int) -> None:
    assert set_seed(seed) == seed
    first = draw()
    assert draw() != first
    set_seed(seed)
    assert draw() == first and current_seed() == seed


@pytest.mark.parametrize(
    ("seed", "error", "words"),
    [
        (
            2**64,
            ValueError,
            r"seed=18446744073709551616, and torch takes seeds from 0 to 2\*\*64 - 1 \(numpy below 2\*\*32",
        ),
        (-1, ValueError, "seed=-1, and torch takes seeds from 0"),
        (1.5, TypeError, "got 1.5, a float: give an integer"),
        ("7", TypeError, "got '7', a str"),
        (None, TypeError, "got None, a NoneType"),
        (True, TypeError, "got True, a bool"),
    ],
)
def test_a_seed_that_cannot_be_leaves_every_generator_alone(seed: Any, error: type[Exception], words: str) -> None:
    set_seed(11)
    expected = draw()
    set_seed(11)
    with pytest.raises(error, match=words):
        set_seed(seed)
    assert draw() == expected and current_seed() == 11


def test_a_seed_that_only_the_rank_takes_out_of_range(ranks: Ranks) -> None:
    def body() -> Any:
        PartialState(cpu=True)
        try:
            return set_seed(2**64 - 1, device_specific=True)
        except ValueError as error:
            return str(error)

    first, second = ranks(body, 2)
    assert first == 2**64 - 1 and "seed=18446744073709551615 and rank 1 added" in second


def test_seeding_is_that_of_the_libraries() -> None:
    set_seed(7)
    assert random.random() == random.Random(7).random()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert np.random.rand() == np.random.RandomState(7).rand()  # noqa: NPY002


def test_deterministic_algorithms() -> None:
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_capture_and_restore() -> None:
    set_seed(3)
    random.gauss(0, 1)  # leaves half a pair behind, which is state too
    np.random.randn()  # noqa: NPY002
    state = capture_rng_state()
    first = draw(), random.gauss(0, 1), float(np.random.randn())  # noqa: NPY002
    plain = {key: value for key, value in state.items() if key != "torch"}
    through_json = {**json.loads(json.dumps(plain)), "torch": state["torch"].clone()}
    restore_rng_state(through_json)
    assert (draw(), random.gauss(0, 1), float(np.random.randn())) == first  # noqa: NPY002
    assert state["torch"].dtype == torch.uint8


def test_what_cannot_be_restored_is_named() -> None:
    with pytest.warns(UserWarning, match=r"cuda \(no such device\); abacus \(no such device\)"):
        restore_rng_state({"cuda": [torch.zeros(16, dtype=torch.uint8)], "abacus": []})


@given(st.integers(-(2**70), 2**70), st.integers(0, 5000))
def test_seeds_of_ranks_fit_every_generator_and_differ(seed: int, rank: int) -> None:
    mine = seed_for_rank(seed, rank)
    assert 0 <= mine < 2**63 and mine == seed_for_rank(seed, rank)
    assert len({mine, seed_for_rank(seed, rank + 1), seed_for_rank(seed + 1, rank)}) == 3


def test_an_unknown_generator_is_refused() -> None:
    with pytest.raises(ValueError, match="dice"):
        synchronize_rng_state("dice")
    with pytest.raises(ValueError, match="needs the generator"):
        synchronize_rng_state("generator")
    with pytest.raises(DeviceError, match="'npu'"):
        synchronize_rng_state("npu")


def test_ranks_differ_only_when_asked(ranks: Ranks) -> None:
    def body() -> Any:
        PartialState(cpu=True)
        return (
            set_seed(5),
            torch.rand(1).item(),
            set_seed(5, device_specific=True),
            torch.rand(1).item(),
            current_seed(),
        )

    (used0, same0, own0, draw0, seed0), (used1, same1, own1, draw1, seed1) = ranks(body, 2)
    assert (used0, used1, own0, own1, seed0, seed1) == (5, 5, 5, 6, 5, 5)
    assert same0 == same1 == draw0 != draw1


def test_synchronised_generators_draw_alike(ranks: Ranks) -> None:
    def body() -> Any:
        rank = PartialState(cpu=True).process_index
        torch.manual_seed(rank)
        generator = torch.Generator().manual_seed(10 + rank)
        synchronize_rng_states(["torch", "generator"], generator)
        return torch.rand(1).item(), torch.rand(1, generator=generator).item()

    first, second = ranks(body, 2)
    assert first == second
    assert first[1] == torch.rand(1, generator=torch.Generator().manual_seed(10)).item()
