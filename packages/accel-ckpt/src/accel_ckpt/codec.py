"""Python values to JSON by schema and back, tensors by reference; never pickle.

Plain JSON stays plain: None, booleans, strings, finite floats, lists, dicts with string keys. Everything else is an
object with the key `$`, which names what it is. Types are compared exactly: a subclass is another type, so that nothing
comes back as less than it was.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel_state.errors import CheckpointCorruptError, CheckpointError

from .tensors import DTYPES, check_storable, same_memory_key

MARK = "$"
MAX_DEPTH = 100
# JSON readers elsewhere lose digits beyond this; Python refuses very long decimal numbers.
_PLAIN_INT = 1 << 63
_FACTORIES: dict[str, Any] = {"int": int, "float": float, "list": list, "dict": dict, "set": set, "None": None}


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How to write a type that JSON does not know, and how to read it back.

    Args:
        type: the exact class; subclasses need their own codec.
        encode: the value to something that can be written (dicts, lists, numbers, tensors, other codecs' types).
        decode: the inverse. It runs on data from disk, so it should only build the value.
        name: what the file calls it; defaults to the class's name. Keep it stable when the class is renamed.
    """

    type: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.type.__qualname__)


def dataclass_codec(cls: type, name: str = "") -> Codec:
    """The codec of a dataclass whose fields are all arguments of its constructor."""
    if not dataclasses.is_dataclass(cls):
        raise CheckpointError(f"{cls.__qualname__} is not a dataclass; write a Codec with encode and decode for it.")
    fields = dataclasses.fields(cls)
    if odd := [field.name for field in fields if not field.init]:
        raise CheckpointError(
            f"{cls.__qualname__} has fields that its constructor does not take ({', '.join(odd)}); write a Codec."
        )
    return Codec(
        type=cls,
        encode=lambda value: {field.name: getattr(value, field.name) for field in fields},
        decode=lambda parts: cls(**parts),
        name=name,
    )


# ---------------------------------------------------------------- writing


class Encoder:
    """Encodes trees and collects their tensors under readable keys.

    Args:
        codecs: for types beyond the built-in ones.
        inline: put tensors into the JSON as base64 (small ones: generators' states) instead of collecting them.
    """

    def __init__(self, codecs: Sequence[Codec] = (), *, inline: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._inline = inline
        self._codecs = {codec.type: codec for codec in codecs}
        self._keys_by_memory: dict[Any, str] = {}

    def encode(self, value: Any, *path: str) -> Any:
        """The JSON form of a value.

        Args:
            path: where the value lies, outermost first; begins tensors' keys and stands in errors.

        Raises:
            CheckpointError: no rule for a value's type; names the place.
        """
        if len(path) > MAX_DEPTH:
            raise CheckpointError(f"{_where(path[:6])}… is nested more than {MAX_DEPTH} deep; does it contain itself?")
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if -_PLAIN_INT <= value < _PLAIN_INT else {MARK: "int", "v": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {MARK: "float", "v": repr(value)}
        if kind is list:
            return self._items(value, path)
        if kind is dict:
            return self._dict(value, path)
        if codec := self._codecs.get(kind):
            return {MARK: "codec", "name": codec.name, "v": self.encode(codec.encode(value), *path, codec.name)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray | np.generic):
            return self._numpy(value, path)
        if kind in _SEQUENCES:
            return {MARK: _SEQUENCES[kind], "v": self._items(value, path)}
        if kind in _MAPPINGS:
            return {MARK: _MAPPINGS[kind], "v": self._pairs(value, path)}
        if kind is defaultdict:
            return {MARK: "defaultdict", "factory": _factory(value, path), "v": self._pairs(value, path)}
        if kind in _SCALARS:
            name, form = _SCALARS[kind]
            return {MARK: name, "v": form(value)}
        raise CheckpointError(
            f"{_where(path)} is a {kind.__module__}.{kind.__qualname__}, which has no form in a checkpoint. Turn it "
            "into numbers, strings, lists, dicts or tensors in state_dict(), or pass codecs=[Codec(...)] for it."
        )

    def _items(self, values: Iterable[Any], path: tuple[str, ...]) -> list[Any]:
        return [self.encode(item, *path, str(i)) for i, item in enumerate(values)]

    def _dict(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Any:
        if all(type(key) is str for key in value) and MARK not in value:
            return {key: self.encode(item, *path, key) for key, item in value.items()}
        return {MARK: "dict", "v": self._pairs(value, path)}

    def _pairs(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> list[list[Any]]:
        return [[self.encode(key, *path, "key"), self.encode(item, *path, str(key))] for key, item in value.items()]

    def _tensor(self, value: Tensor, path: tuple[str, ...]) -> Any:
        tensor = check_storable(value, _where(path))
        if self._inline:
            return {MARK: "tensor", **_inline(tensor)}
        memory = same_memory_key(tensor)
        if memory is None or (key := self._keys_by_memory.get(memory)) is None:
            key = base = "/".join(path)
            number = 1
            while key in self.tensors:  # {1: a, "1": b} lead to one path
                number += 1
                key = f"{base}~{number}"
            self.tensors[key] = tensor
            if memory is not None:
                self._keys_by_memory[memory] = key
        return {MARK: "tensor", "key": key}

    def _numpy(self, value: Any, path: tuple[str, ...]) -> Any:
        if value.dtype.name not in DTYPES or not (isinstance(value, np.generic) or type(value) is np.ndarray):
            raise CheckpointError(
                f"{_where(path)} is a {type(value).__qualname__} of dtype {value.dtype}, which has no form in a "
                "checkpoint; convert it to a numeric array or a list in state_dict()."
            )
        tensor = torch.from_numpy(np.array(value, order="C").astype(value.dtype.newbyteorder("="), copy=False))
        scalar = isinstance(value, np.generic)
        if scalar or self._inline:
            return {MARK: "numpy", "scalar": scalar, "v": {MARK: "tensor", **_inline(tensor)}}
        return {MARK: "numpy", "scalar": False, "v": self._tensor(tensor, path)}


def _inline(tensor: Tensor) -> dict[str, Any]:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else b""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": base64.b64encode(data if isinstance(data, bytes) else data.numpy().tobytes()).decode(),
    }


def _factory(value: defaultdict[Any, Any], path: tuple[str, ...]) -> str:
    for name, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return name
    raise CheckpointError(
        f"{_where(path)} is a defaultdict with the factory {value.default_factory!r}, which has no form in a "
        f"checkpoint (allowed: {', '.join(_FACTORIES)}); make it a dict in state_dict()."
    )


_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[type, str] = {OrderedDict: "ordered", Counter: "counter"}
_SCALARS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("bytes", lambda value: base64.b64encode(value).decode()),
    complex: ("complex", lambda value: [repr(value.real), repr(value.imag)]),
    torch.Size: ("size", list),
    torch.dtype: ("dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("device", str),
}


# ---------------------------------------------------------------- reading


def decode(
    tree: Any, tensors: Mapping[str, Tensor], codecs: Sequence[Codec] = (), *, where: str = "", copy: bool = True
) -> Any:
    """The value that was encoded.

    Args:
        tree: the JSON form.
        tensors: what the references mean.
        where: what stands in front of the place in errors.
        copy: give out copies, so that no one is left with a view of a mapped file. One reference, one copy: tensors
            that were one before are one again.

    Raises:
        CheckpointCorruptError: the form is not one that we write.
        CheckpointError: a codec that was used is not among `codecs`.
    """
    try:
        return _Decoder(tensors, {codec.name: codec for codec in codecs}, where, copy).decode(tree)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointCorruptError(f"{where} holds a value that cannot be read: {error!r}") from error


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor], codecs: Mapping[str, Codec], where: str, copy: bool) -> None:
        self._tensors, self._codecs, self._where, self._copy = tensors, codecs, where, copy
        self._given: dict[str, Tensor] = {}

    def decode(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.decode(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if MARK not in tree:
            return {key: self.decode(item) for key, item in tree.items()}
        read: Callable[[Any], Any] | None = getattr(self, f"_read_{tree[MARK]}", None)
        if read is None:
            raise ValueError(f"unknown kind {tree[MARK]!r}")
        return read(tree)

    def _pairs(self, tree: Any) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(item)) for key, item in tree["v"]]

    def _read_int(self, tree: Any) -> int:
        return int(tree["v"], 16)

    def _read_float(self, tree: Any) -> float:
        return float(tree["v"])

    def _read_complex(self, tree: Any) -> complex:
        real, imag = tree["v"]
        return complex(float(real), float(imag))

    def _read_bytes(self, tree: Any) -> bytes:
        return base64.b64decode(tree["v"], validate=True)

    def _read_tuple(self, tree: Any) -> tuple[Any, ...]:
        return tuple(self.decode(tree["v"]))

    def _read_set(self, tree: Any) -> set[Any]:
        return set(self.decode(tree["v"]))

    def _read_frozenset(self, tree: Any) -> frozenset[Any]:
        return frozenset(self.decode(tree["v"]))

    def _read_dict(self, tree: Any) -> dict[Any, Any]:
        return dict(self._pairs(tree))

    def _read_ordered(self, tree: Any) -> OrderedDict[Any, Any]:
        return OrderedDict(self._pairs(tree))

    def _read_counter(self, tree: Any) -> Counter[Any]:
        return Counter(dict(self._pairs(tree)))

    def _read_defaultdict(self, tree: Any) -> defaultdict[Any, Any]:
        return defaultdict(_FACTORIES[tree["factory"]], self._pairs(tree))

    def _read_size(self, tree: Any) -> torch.Size:
        return torch.Size(tree["v"])

    def _read_dtype(self, tree: Any) -> torch.dtype:
        dtype = getattr(torch, tree["v"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch.{tree['v']} is not a dtype")
        return dtype

    def _read_device(self, tree: Any) -> torch.device:
        return torch.device(tree["v"])

    def _read_tensor(self, tree: Any) -> Tensor:
        if "data" in tree:
            data = bytearray(base64.b64decode(tree["data"], validate=True))
            dtype = DTYPES[tree["dtype"]]
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            return flat.reshape(tree["shape"])
        key = tree["key"]
        if key not in self._given:
            tensor = self._tensors[key]
            self._given[key] = tensor.clone() if self._copy else tensor
        return self._given[key]

    def _read_numpy(self, tree: Any) -> Any:
        array = self.decode(tree["v"]).numpy()
        return array[()] if tree["scalar"] else array

    def _read_codec(self, tree: Any) -> Any:
        codec = self._codecs.get(tree["name"])
        if codec is None:
            raise CheckpointError(
                f"{self._where} holds a {tree['name']!r}, written by a codec that was not passed for reading; known: "
                f"{', '.join(sorted(self._codecs)) or 'none'}. Pass codecs=[...] with the one it was saved with."
            )
        return codec.decode(self.decode(tree["v"]))


# ---------------------------------------------------------------- text


def dump_json(tree: Any) -> str:
    """JSON text of an encoded tree: exact floats, no NaN, nothing but what JSON has."""
    return json.dumps(tree, allow_nan=False, separators=(",", ":"))


def load_json(text: bytes, where: str) -> Any:
    """Parse JSON that may be damaged or hostile.

    Raises:
        CheckpointCorruptError: not JSON, not UTF-8, NaN or infinity as a number, the same key twice, nested too deep.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"the constant {name} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) != len(pairs):
            raise ValueError("the same key twice")
        return found

    def finite(digits: str) -> float:
        if math.isinf(number := float(digits)):
            raise ValueError(f"the number {digits[:20]} is beyond all floats")
        return number

    try:
        return json.loads(text, parse_constant=refuse, parse_float=finite, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{where} is not valid JSON: {error}") from error


def _where(path: Sequence[str]) -> str:
    return "/".join(path) or "the value"
