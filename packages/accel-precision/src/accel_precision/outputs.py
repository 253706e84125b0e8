"""Bring half-precision outputs back to fp32, in whatever container a model returns them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor

HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})


def convert_to_fp32(tensor: Any) -> Any:
    """A tree of tensors with every fp16 and bf16 tensor in fp32, everything else as it was.

    Args:
        tensor: a tensor, or any nesting of dicts and other mappings, lists, tuples, named tuples and dataclasses
            (also those that are mappings at once, as transformers' ModelOutput is). The type of each container is kept.

    A container in which nothing had to change is returned itself; others are copied, never written to. A tensor that
    occurs twice is converted once.

    Cost: one cast per half-precision tensor, differentiable.
    """
    if isinstance(tensor, Tensor):
        return tensor.float() if tensor.dtype in HALF_DTYPES else tensor
    return _convert(tensor, {})


def _convert(value: Any, done: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        if value.dtype not in HALF_DTYPES:
            return value
        if id(value) not in done:
            done[id(value)] = value.float()
        return done[id(value)]
    if isinstance(value, Mapping):
        return _convert_mapping(value, done)
    if isinstance(value, tuple | list):
        items = [_convert(item, done) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)  # type: ignore[call-arg,unused-ignore]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = _changed_fields(value, done)
        return _with_fields(copy.copy(value), changes) if changes else value
    return value


def _convert_mapping(value: Mapping[Any, Any], done: dict[int, Any]) -> Any:
    items = {key: _convert(item, done) for key, item in value.items()}
    changed = {key: item for key, item in items.items() if item is not value[key]}
    fields: dict[str, Any] = _changed_fields(value, done) if dataclasses.is_dataclass(value) else {}
    if not changed and not fields:
        return value
    if type(value) is dict:
        return items
    if not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    new = copy.copy(value)
    for key, item in changed.items():
        new[key] = item
    return _with_fields(new, fields)


def _changed_fields(value: Any, done: dict[int, Any]) -> dict[str, Any]:
    old = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    return {name: new for name, item in old.items() if (new := _convert(item, done)) is not item}


def _with_fields(value: Any, fields: Mapping[str, Any]) -> Any:
    for name, item in fields.items():
        object.__setattr__(value, name, item)  # frozen dataclasses refuse the ordinary way
    return value


class ConvertOutputsToFp32:
    """A callable that runs another one and converts what it returns with `convert_to_fp32`. Pickles if that one does.

    Args:
        model_forward: the function or bound method to run.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the inner callable returns, in fp32."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> ConvertOutputsToFp32:
    """The same callable with outputs in fp32; `__wrapped__` leads back, so signatures stay visible."""
    return ConvertOutputsToFp32(model_forward)
