from __future__ import annotations

import dataclasses
import enum
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_tracking import mask_secrets
from accel_tracking.values import flat, plain, scalar


@pytest.mark.parametrize(
    "key",
    [
        "password",
        "WANDB_API_KEY",
        "apiKey",
        "api-key",
        "AWS_SECRET_ACCESS_KEY",
        "db.passwd",
        "client_secret",
        "Authorization",
    ],
)
def test_credentials_are_masked_by_their_key_in_any_spelling(key: str) -> None:
    assert mask_secrets({key: "hunter2", "nested": [{key: "x"}]}) == {key: "***", "nested": [{key: "***"}]}


@pytest.mark.parametrize("key", ["hub_token", "token", "HF_TOKEN", "accessToken"])
def test_tokens_are_masked_where_the_value_looks_like_a_credential(key: str) -> None:
    assert mask_secrets({key: "hf_0123456789abcdef"}) == {key: "***"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pad_token", "<pad>"),
        ("eos_token", "<|endoftext|>"),
        ("mask_token", "[MASK]"),
        ("max_tokens", 512),
        ("tokenizer", "bert-base-uncased"),
        ("keyboard", "qwerty-layout"),
        ("monkey", "banana-banana"),
        ("compass", "north-by-northwest"),
        ("password", None),
        ("use_secret", True),
    ],
)
def test_what_only_sounds_like_a_credential_stays_readable(key: str, value: object) -> None:
    assert mask_secrets({key: value}) == {key: value}


def test_masking_leaves_the_original_alone() -> None:
    config = {"login": {"password": "x", "user": "me"}}
    assert mask_secrets(config) == {"login": {"password": "***", "user": "me"}}
    assert config["login"]["password"] == "x"


def test_scalars_come_out_of_tensors_and_arrays() -> None:
    assert scalar(torch.tensor([2.5])) == 2.5
    assert scalar(np.float32(0.5)) == 0.5
    assert scalar(np.array(3)) == 3
    many = torch.zeros(2)
    assert scalar(many) is many


@dataclasses.dataclass
class Options:
    rate: float
    where: Path


class Colour(enum.Enum):
    RED = "red"


def test_plain_takes_everything_apart() -> None:
    value = {
        1: Options(0.5, Path("a/b")),
        "colour": Colour.RED,
        "tensor": torch.tensor([[1.0, math.nan]]),
        "tuple": (math.inf, -math.inf, None, True),
        "type": torch.float32,
    }
    assert plain(value) == {
        "1": {"rate": 0.5, "where": "a/b"},
        "colour": "red",
        "tensor": [[1.0, "NaN"]],
        "tuple": ["Infinity", "-Infinity", None, True],
        "type": "torch.float32",
    }


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.floats(), inner),
    )
)
def test_plain_is_always_valid_json(value: object) -> None:
    json.dumps(plain(value), allow_nan=False)


@given(st.floats())
def test_float_reads_plain_numbers_back(value: float) -> None:
    back = float(plain(value))
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_flat_joins_names_by_dots() -> None:
    assert flat({"a": 1, "b": {"c": 2, "d": {"e": 3}}}) == {"a": 1, "b.c": 2, "b.d.e": 3}
