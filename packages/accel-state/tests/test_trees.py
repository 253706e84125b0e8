"""Walking nested data, on one process."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state import (
    TensorInformation,
    concatenate,
    find_batch_size,
    find_device,
    get_data_structure,
    honor_type,
    ignorant_find_batch_size,
    initialize_tensors,
    is_namedtuple,
    is_tensor_information,
    listify,
    pad_input_tensors,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from accel_state.collectives.layout import any_first, flatten, whole
from accel_state.collectives.packing import as_bytes, as_message, as_plain, columns, join, padded_bytes
from accel_state.collectives.trees import leaves_with_paths, loop_in, map_leaves

Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    note: str = "kept"


class Bag:
    """An object that moves itself, by a `to` without flags."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def to(self, device: torch.device) -> Bag:
        return Bag(self.value.to(device))


def trees() -> st.SearchStrategy[Any]:
    tensors = st.lists(st.integers(-9, 9), max_size=4).map(torch.tensor)
    leaves = st.one_of(tensors, st.text(max_size=3), st.none(), st.integers())
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(st.text(max_size=2), inner, max_size=3),
            st.builds(Point, inner, inner),
            st.builds(OrderedDict, st.dictionaries(st.integers(), inner, max_size=2)),
        ),
        max_leaves=12,
    )


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(is_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)


@given(trees())
def test_mapping_the_identity_gives_an_equal_tree_of_the_same_types(tree: Any) -> None:
    assert is_same(map_leaves(lambda leaf: leaf, tree), tree)


@given(trees())
def test_every_leaf_is_visited_once_and_its_path_leads_to_it(tree: Any) -> None:
    visited: list[Any] = []
    map_leaves(visited.append, tree)
    with_paths = list(leaves_with_paths(tree))
    assert len(visited) == len(with_paths)
    for (path, leaf), seen in zip(with_paths, visited, strict=True):
        assert leaf is seen
        assert eval(f"tree{path}", {"tree": tree}) is leaf  # noqa: S307  (the path is meant to be Python)


def test_recursively_apply_keeps_other_leaves_or_names_them() -> None:
    data = {"a": torch.ones(2), "b": ["text", Point(torch.zeros(1), 3)]}
    assert is_same(
        recursively_apply(torch.add, data, 1), {"a": torch.full((2,), 2.0), "b": ["text", Point(torch.ones(1), 3)]}
    )
    with pytest.raises(TypeError, match=r"a str at \['b'\]\[0\]"):
        recursively_apply(torch.add, data, 1, error_on_other_type=True)


def test_dataclasses_and_default_dicts_are_rebuilt() -> None:
    doubled = recursively_apply(lambda t: t * 2, Output(torch.ones(1)))
    assert isinstance(doubled, Output) and doubled.logits.item() == 2 and doubled.note == "kept"
    grown = recursively_apply(lambda t: t * 2, defaultdict(list, {"a": torch.ones(1)}))
    assert grown["a"].item() == 2 and grown["new"] == []


def test_honor_type() -> None:
    assert honor_type([1], iter([2, 3])) == [2, 3]
    assert honor_type((1,), iter([2, 3])) == (2, 3)
    assert honor_type(Point(1, 2), iter([2, 3])) == Point(2, 3)
    assert is_namedtuple(Point(1, 2)) and not is_namedtuple((1, 2))


def test_send_to_device_moves_tensors_only_and_honours_skip_keys() -> None:
    data = {"a": torch.ones(1), "s": "x", "deep": [{"a": torch.ones(1), "b": torch.ones(1)}], "bag": Bag(torch.ones(1))}
    moved = send_to_device(data, "meta", skip_keys="a")
    assert moved["a"].device.type == "cpu" and moved["deep"][0]["a"].device.type == "cpu"
    assert moved["deep"][0]["b"].device.type == "meta" and moved["bag"].value.device.type == "meta"
    assert moved["s"] == "x"
    assert send_to_device(Output(torch.ones(1)), "meta").logits.device.type == "meta"


def test_find_batch_size_and_device() -> None:
    assert find_batch_size({"a": [torch.ones(3, 2)]}) == 3
    assert find_device([1, {"a": torch.ones(1, device="meta")}]) == torch.device("meta")
    assert find_device([]) is None
    with pytest.raises(ValueError, match="empty dict"):
        find_batch_size({})
    with pytest.raises(TypeError, match=r"at \['a'\] is a str"):
        find_batch_size({"a": "text"})
    with pytest.raises(TypeError, match="without dimensions"):
        find_batch_size(torch.tensor(1))
    assert ignorant_find_batch_size([None]) is None


def test_slice_concatenate_and_listify() -> None:
    data = {"a": torch.arange(6).view(3, 2), "s": "x"}
    assert is_same(slice_tensors(data, slice(1, 3)), {"a": torch.tensor([[2, 3], [4, 5]]), "s": "x"})
    joined = concatenate([Point(torch.ones(1, 2), [torch.ones(1)])] * 3)
    assert joined.x.shape == (3, 2) and joined.y[0].shape == (3,)
    assert concatenate([torch.ones(1, 2)] * 2, dim=1).shape == (1, 4)
    with pytest.raises(TypeError, match="a str"):
        concatenate([{"a": "x"}, {"a": "y"}])
    assert listify({"a": torch.ones(2)}) == {"a": [1.0, 1.0]}


def test_structure_round_trip() -> None:
    structure = get_data_structure({"a": torch.ones(2, 3, dtype=torch.int8), "b": 1})
    assert structure == {"a": TensorInformation(torch.Size([2, 3]), torch.int8), "b": 1}
    assert is_tensor_information(structure["a"])
    made = initialize_tensors(structure)
    assert made["a"].shape == (2, 3) and made["a"].dtype == torch.int8 and made["b"] == 1


@pytest.mark.parametrize(("size", "processes", "expected"), [(5, 2, 6), (6, 2, 6), (1, 4, 4), (7, 4, 8)])
def test_pad_input_tensors_repeats_the_first_sample(size: int, processes: int, expected: int) -> None:
    padded = pad_input_tensors({"x": torch.arange(size), "other": torch.ones(9)}, size, processes)
    assert padded["x"].tolist() == [*range(size), *[0] * (expected - size)]
    assert padded["other"].shape == (9,)


# ---------------------------------------------------------------- layout: texts and bytes

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn, torch.uint8]


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), min_size=1, max_size=3)), max_size=5),
    st.integers(0, 3).map(lambda count: 16 * count),
)
def test_a_message_brings_back_every_tensor(specs: list[tuple[torch.dtype, list[int]]], extra: int) -> None:
    leaves = [torch.randint(0, 2, shape).to(dtype) for dtype, shape in specs]
    message = as_message(leaves, padded_bytes(leaves) + extra)
    assert message.numel() == padded_bytes(leaves) + extra
    rows = torch.stack([message, message])
    sizes = [leaf.shape[0] for leaf in leaves]
    for leaf, twice in zip(leaves, join(leaves, rows, [sizes, sizes]), strict=True):
        assert twice.dtype == leaf.dtype and twice.tolist() == leaf.tolist() * 2
    for leaf, column in zip(leaves, columns(leaves, rows), strict=True):
        assert column.dtype == leaf.dtype and column.flatten().tolist() == leaf.flatten().tolist() * 2


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4))
def test_unequal_parts_are_joined_in_order(sizes_by_rank: list[list[int]]) -> None:
    tails = [(2,), (), (1, 3)]

    def leaves_of(rank: int) -> list[torch.Tensor]:
        sizes = zip(sizes_by_rank[rank], tails, strict=True)
        return [torch.full((size, *tail), float(rank)) for size, tail in sizes]

    by_rank = [leaves_of(rank) for rank in range(len(sizes_by_rank))]
    longest = max(map(padded_bytes, by_rank))
    rows = torch.stack([as_message(leaves, longest) for leaves in by_rank])
    for index, whole_one in enumerate(join(by_rank[0], rows, sizes_by_rank)):
        assert torch.equal(whole_one, torch.cat([leaves[index] for leaves in by_rank]))


def test_bytes_of_what_does_not_lie_in_order() -> None:
    transposed, conjugate = torch.arange(6).view(2, 3).T, torch.tensor([1 + 2j]).conj()
    for leaf in (transposed, conjugate, conjugate.imag):
        assert torch.equal(as_bytes(leaf).view(leaf.dtype).view(leaf.shape), leaf)
        assert as_plain(leaf).is_contiguous() and not as_plain(leaf).is_neg()


def test_the_text_of_a_layout() -> None:
    numbers, point = torch.ones(1, dtype=torch.int64), Point(torch.ones(0), [])
    tree = {"a": torch.ones(2, 3), 0: (numbers, [torch.tensor(True)]), "p": point}
    leaves, text = flatten(tree, "gather", any_first)
    assert len(leaves) == 4
    assert text == "gather {'a': float32[*, 3], 0: (int64[*], [bool[*]]), 'p': Point(float32[*], [])}"
    assert flatten(torch.ones(2, 3), "x", whole)[1] == "x float32[2, 3]"


def looped() -> dict[str, Any]:
    inner: list[Any] = [torch.ones(1)]
    inner.append({"again": inner})
    return {"a": torch.ones(1), "x": inner}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("send_to_device", lambda data: send_to_device(data, "cpu")),
        ("recursively_apply", lambda data: recursively_apply(torch.neg, data=data)),
        ("recursively_apply", lambda data: recursively_apply(torch.neg, data, error_on_other_type=True)),
        ("concatenate", lambda data: concatenate([data, data])),
        ("find_device", lambda data: find_device(endless())),
        ("find_batch_size", lambda data: find_batch_size(endless())),
        ("gather", lambda data: flatten(data, "gather", any_first)),
    ],
)
def test_data_without_an_end_is_refused_with_the_place(name: str, call: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: the data holds itself, at \["):
        call(looped())


def endless() -> list[Any]:
    data: list[Any] = []
    data.append(data)
    return data


def test_the_place_of_a_loop_and_data_that_is_only_deep() -> None:
    assert loop_in(looped()) == "['x'][1]['again']"
    shared = [torch.ones(1)]
    assert loop_in([shared, shared]) is None
    deep: Any = torch.ones(1)
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RecursionError):
        send_to_device(deep, "cpu")


def test_leaves_that_cannot_be_sent_are_named() -> None:
    with pytest.raises(TypeError, match=r"a str at \['a'\]\[1\] \('x'\)"):
        flatten({"a": [torch.ones(1), "x"]}, "gather", any_first)
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    refused = {"to_dense": torch.ones(2).to_sparse(), "no data": torch.ones(2, device="meta"), "values": nested}
    for word, leaf in refused.items():
        with pytest.raises(TypeError, match=rf"gather: the tensor at \[0\] .*{word}"):
            flatten([leaf], "gather", any_first)
