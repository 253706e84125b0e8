import dataclasses
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from accel_precision import ConvertOutputsToFp32, convert_outputs_to_fp32, convert_to_fp32

Pair = namedtuple("Pair", ["loss", "logits"])


@dataclasses.dataclass
class Out:
    x: Any
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class FrozenOut:
    x: Any


@dataclasses.dataclass
class ModelOutput(OrderedDict):
    """Attribute, item and field at once, as transformers has it."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def half(dtype=torch.bfloat16):
    return torch.ones(2, dtype=dtype)


def test_half_precision_tensors_become_fp32_and_others_stay():
    for dtype in (torch.float16, torch.bfloat16):
        assert convert_to_fp32(half(dtype)).dtype is torch.float32
    for other in (torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)):
        assert convert_to_fp32(other) is other


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda t: {"x": t}, lambda out: out["x"]),
        (lambda t: OrderedDict(x=t), lambda out: out["x"]),
        (lambda t: defaultdict(list, x=t), lambda out: out["x"]),
        (lambda t: [1, t], lambda out: out[1]),
        (lambda t: (None, t), lambda out: out[1]),
        (lambda t: Pair("a", t), lambda out: out.logits),
        (Out, lambda out: out.x),
        (FrozenOut, lambda out: out.x),
        (lambda t: ModelOutput(logits=t), lambda out: out.logits),
        (lambda t: ModelOutput(logits=t), lambda out: out["logits"]),
        (lambda t: {"deep": [Pair(Out((t,)), None)]}, lambda out: out["deep"][0].loss.x[0]),
    ],
)
def test_every_container_is_converted_and_keeps_its_type(make, read):
    out = make(half())
    new = convert_to_fp32(out)
    assert type(new) is type(out)
    assert read(new).dtype is torch.float32
    assert read(out).dtype is torch.bfloat16, "the model's own container was written to"


def test_extras_of_containers_are_kept():
    assert convert_to_fp32(defaultdict(list, x=half())).default_factory is list
    assert convert_to_fp32(Out(half(), note="mine")).note == "mine"
    assert convert_to_fp32(MappingProxyType({"x": half()}))["x"].dtype is torch.float32


def test_nothing_to_convert_gives_the_same_object_back():
    for out in (
        {"x": torch.ones(1)},
        [torch.ones(1)],
        Pair(1, 2),
        Out(torch.ones(1)),
        ModelOutput(),
        "text",
        None,
        Out,
    ):
        assert convert_to_fp32(out) is out


def test_a_tensor_that_occurs_twice_is_converted_once():
    shared = half()
    out = convert_to_fp32(ModelOutput(logits=shared, loss=[shared]))
    assert out["logits"] is out.logits is out["loss"][0]


def test_gradients_flow_through_the_conversion():
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    convert_to_fp32({"x": x * 2})["x"].sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2, dtype=torch.bfloat16))


def test_functions_are_wrapped_visibly():
    layer = nn.Linear(2, 2, dtype=torch.bfloat16)
    wrapped = convert_outputs_to_fp32(layer.forward)
    assert isinstance(wrapped, ConvertOutputsToFp32)
    assert wrapped(half()).dtype is torch.float32
    assert wrapped.__wrapped__ == layer.forward
    assert pickle.loads(pickle.dumps(wrapped))(half()).dtype is torch.float32
