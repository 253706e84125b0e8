"""Parts of lists, tuples, dicts, tensors."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset

from accel_state.splitting import drop_padding, part_bounds, split_part


@given(st.integers(0, 50), st.integers(1, 9))
def test_parts_are_contiguous_complete_and_the_first_are_longer(length: int, count: int) -> None:
    bounds = [part_bounds(length, index, count) for index in range(count)]
    assert bounds[0][0] == 0 and bounds[-1][1] == length
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(bounds))
    sizes = [end - start for start, end in bounds]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@given(st.lists(st.integers(-99, 99), min_size=1, max_size=20), st.integers(2, 7))
def test_padding_repeats_the_last_element_so_that_parts_are_equally_long(items: list[int], count: int) -> None:
    parts = [split_part(items, index, count, apply_padding=True) for index in range(count)]
    assert len({len(part) for part in parts}) == 1
    for index, part in enumerate(parts):
        own = split_part(items, index, count)
        assert part == own + [items[-1]] * (len(part) - len(own))
    assert split_part(torch.tensor(items), 0, count, apply_padding=True).tolist() == parts[0]


@pytest.mark.parametrize(
    ("inputs", "pad", "expected"),
    [
        (["a", "b", "c"], False, (["a", "b"], ["c"])),
        (["a", "b", "c"], True, (["a", "b"], ["c", "c"])),
        (("a", "b", "c"), True, (("a", "b"), ("c", "c"))),
        ([1], False, ([1], [])),
        ([1], True, ([1], [1])),
        ([], True, ([], [])),
        ({"x": [1, 2, 3], "y": ("p", "q", "r")}, False, ({"x": [1, 2], "y": ("p", "q")}, {"x": [3], "y": ("r",)})),
        (range(3), False, (range(2), range(2, 3))),
        (range(3), True, (range(2), [2, 2])),
    ],
)
def test_types_are_kept(inputs: Any, pad: bool, expected: tuple[Any, Any]) -> None:
    assert (split_part(inputs, 0, 2, pad), split_part(inputs, 1, 2, pad)) == expected


def test_mappings_keep_their_type_and_one_process_gets_all() -> None:
    inputs = OrderedDict(a=[1, 2], b=torch.arange(2))
    part = split_part(inputs, 1, 2)
    assert type(part) is OrderedDict and part["a"] == [2] and part["b"].tolist() == [1]
    assert split_part(inputs, 0, 1) is inputs


def test_data_sets_are_asked_to_select() -> None:
    class Rows:
        def __len__(self) -> int:
            return 3

        def select(self, indices: list[int]) -> list[int]:
            return indices

    assert split_part(Rows(), 1, 2, apply_padding=True) == [2, 2]


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index**2


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


def test_data_sets_of_torch_become_subsets() -> None:
    data = Squares()
    plain, padded = split_part(data, 1, 2), split_part(data, 1, 2, apply_padding=True)
    assert isinstance(plain, Subset) and plain.dataset is data and list(plain) == [4]
    assert isinstance(padded, Subset) and list(padded) == [4, 4]
    assert list(split_part({"x": data, "y": ["a", "c"][:1] * 3}, 0, 2)["x"]) == [0, 1]


def test_arrays_stay_arrays() -> None:
    array = np.arange(6).reshape(3, 2)
    assert isinstance(split_part(array, 1, 2), np.ndarray)
    assert split_part(array, 1, 2).tolist() == [[4, 5]]
    assert split_part(array, 1, 2, apply_padding=True).tolist() == [[4, 5], [4, 5]]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ("text", r"a str \('text'\), which cannot be split: give a list"),
        (7, r"a int \(7\)"),
        ({1, 2}, "a set"),
        (torch.tensor(1.0), "a Tensor"),
        (np.array(1.0), "a ndarray"),
        (Stream(), "a Stream"),
        (deque([1, 2]), "a deque"),
        ({"a": [1, 2], "b": True}, r"a bool at key 'b' \(True\), which cannot be split"),
        ({"a": [1, 2], "b": "ab"}, r"a str at key 'b'"),
    ],
)
def test_what_has_no_parts_is_refused(inputs: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        split_part(inputs, 0, 2)


def test_unequal_lengths_name_keys_and_lengths() -> None:
    with pytest.raises(ValueError, match=r"'a': 3, 'b': 1"):
        split_part({"a": [1, 2, 3], "b": [1]}, 0, 2)


@pytest.mark.parametrize("length", range(1, 8))
@pytest.mark.parametrize("num_processes", [1, 2, 3, 5])
def test_padding_is_dropped_again(length: int, num_processes: int) -> None:
    whole = list(range(length))
    parts = [split_part(whole, rank, num_processes, apply_padding=True) for rank in range(num_processes)]
    gathered = [item for part in parts for item in part]
    assert drop_padding(gathered, length, num_processes) == whole
    assert drop_padding({"x": tuple(gathered)}, length, num_processes) == {"x": tuple(whole)}
    assert drop_padding(torch.tensor(gathered), length, num_processes).tolist() == whole


def test_padding_of_something_else_is_not_dropped() -> None:
    with pytest.raises(ValueError, match="5 items are not what 2 processes give for 3, which is 2 each"):
        drop_padding([1] * 5, 3, 2)
