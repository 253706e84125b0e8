"""Round trips of values through JSON, and what the codec refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_ckpt import Codec, dataclass_codec
from accel_ckpt.codec import Encoder, decode, dump_json, load_json
from accel_state.errors import CheckpointCorruptError, CheckpointError


def round_trip(value, codecs=(), inline=False):
    encoder = Encoder(codecs, inline=inline)
    text = dump_json(encoder.encode(value, "root"))
    return decode(load_json(text.encode(), "text"), encoder.tensors, codecs)


def same(a, b) -> bool:
    """Equal in type and value, all the way down; NaN equals NaN, -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8])
tensors = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    dtypes,
    st.lists(st.integers(0, 3), max_size=3),
)
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers(allow_nan=False)
)
trees = st.recursive(
    leaves | tensors,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict),
        st.sets(st.integers(), max_size=4),
        st.frozensets(st.text(), max_size=4),
    ),
    max_leaves=20,
)


@given(trees, st.booleans())
def test_values_come_back_as_they_were(value, inline):
    assert same(round_trip(value, inline=inline), value)


@pytest.mark.parametrize(
    "value",
    [
        {"$": "tensor", "key": "not a reference"},
        {"$": {"$": 1}},
        2**200,
        -(2**63),
        2**63,
        float("nan"),
        float("-inf"),
        -0.0,
        5e-324,
        "\ud800 lone surrogate",
        {1: "a", "1": "b", True and 2: "c"},
        Counter({3: 2, 7: 1}),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cuda:1"),
        np.float64(0.1),
        np.int32(7),
        np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2],
        np.array(3.0),
    ],
    ids=repr,
)
def test_particular_values(value):
    assert same(round_trip(value), value)


def test_foreign_byte_order_keeps_its_values():
    assert round_trip(np.array([1, 256], dtype=">i4")).tolist() == [1, 256]


def test_defaultdict_keeps_its_factory():
    back = round_trip(defaultdict(list, {"a": [1]}))
    assert back["b"] == []
    assert type(back) is defaultdict
    with pytest.raises(CheckpointError, match="root is a defaultdict with the factory"):
        round_trip(defaultdict(lambda: 3))


def test_one_tensor_twice_is_stored_once_and_is_one_again():
    tensor = torch.arange(3.0)
    encoder = Encoder()
    tree = encoder.encode({"a": tensor, "b": [tensor], "c": tensor.clone()}, "root")
    assert len(encoder.tensors) == 2
    back = decode(tree, encoder.tensors)
    assert back["a"] is back["b"][0]
    assert back["c"] is not back["a"]


def test_colliding_paths_keep_their_own_tensors():
    value = {1: torch.tensor(1), "1": torch.tensor(2), "a": {"b/c": torch.tensor(3)}, "a/b": {"c": torch.tensor(4)}}
    assert same(round_trip(value), value)


def test_what_was_read_is_private():
    encoder = Encoder()
    tensor = torch.zeros(2)
    back = decode(encoder.encode([tensor], "root"), encoder.tensors)
    back[0].add_(1)
    assert tensor.tolist() == [0, 0]


class Odd:
    pass


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize("value", [Odd(), Pair(1, 2), open, lambda: 0, torch.nn.Linear(1, 1), range(3)])
def test_unknown_types_are_refused_with_their_place(value):
    with pytest.raises(CheckpointError, match=r"root/x/0 is a .*codecs="):
        round_trip({"x": [value]})


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.empty(2, device="meta"), "meta device"),
        (torch.eye(2).to_sparse(), "layout"),
        (np.array(["a"]), "dtype <U1"),
        (np.array([Odd()]), "dtype object"),
    ],
)
def test_unusual_tensors_are_refused_with_the_reason(tensor, reason):
    with pytest.raises(CheckpointError, match=f"root/x .*{reason}"):
        round_trip({"x": tensor})


def test_a_value_that_contains_itself_is_refused():
    value: list = []
    value.append(value)
    with pytest.raises(CheckpointError, match="contain itself"):
        round_trip(value)


@dataclasses.dataclass
class Config:
    rate: float
    layers: tuple[int, ...]
    weight: torch.Tensor


def test_a_registered_dataclass_comes_back():
    codecs = [dataclass_codec(Config)]
    back = round_trip({"config": Config(0.1, (1, 2), torch.ones(2))}, codecs)["config"]
    assert (back.rate, back.layers, back.weight.tolist()) == (0.1, (1, 2), [1, 1])
    with pytest.raises(CheckpointError, match=r"is a .*Config"):
        round_trip(back)


def test_reading_without_the_codec_names_it():
    encoder = Encoder([dataclass_codec(Config, name="config")])
    tree = encoder.encode(Config(0.1, (), torch.ones(1)), "root")
    with pytest.raises(CheckpointError, match="holds a 'config', written by a codec that was not passed"):
        decode(tree, encoder.tensors, where="root")


def test_a_codec_that_returns_its_own_type_is_refused():
    codec = Codec(type=Odd, encode=lambda value: value, decode=lambda value: value)
    with pytest.raises(CheckpointError, match="contain itself"):
        round_trip(Odd(), [codec])


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "no such kind"},
        {"$": ["int"]},
        {"$": "int", "v": "zz"},
        {"$": "int"},
        {"$": "tensor", "key": "absent"},
        {"$": "tensor", "dtype": "float32", "shape": [5], "data": "AAAA"},
        {"$": "tensor", "dtype": "load", "shape": [1], "data": "AAAA"},
        {"$": "dtype", "v": "load"},
        {"$": "device", "v": "nowhere"},
        {"$": "dict", "v": [[1]]},
        {"$": "dict", "v": [[[1], 2]]},
        {"$": "defaultdict", "factory": "eval", "v": []},
        {"$": "bytes", "v": "?"},
        {"$": "set", "v": [[1]]},
    ],
)
def test_damaged_forms_are_said_to_be_damaged(tree):
    with pytest.raises(CheckpointCorruptError, match="place holds a value that cannot be read"):
        decode(tree, {}, where="place")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[NaN]",
        b"[Infinity]",
        b'{"a":1,"a":2}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * (sys.get_int_max_str_digits() + 1),
    ],
    ids=lambda text: text[:12].decode("latin-1"),
)
def test_hostile_json_is_refused(text):
    with pytest.raises(CheckpointCorruptError, match="name is not valid JSON"):
        load_json(text, "name")


def test_the_text_is_plain_json():
    json.loads(dump_json(Encoder().encode({"a": float("nan"), "b": (1, 2), 3: torch.ones(1)}, "root")))
