"""Which weight goes into which file: names, sizes, ties."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accel_state.errors import CheckpointError

from .tensors import check_storable, same_memory_key

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000 ** (i + 1) for i, letter in enumerate("KMGT")}
_UNITS |= {f"{letter}IB": 1024 ** (i + 1) for i, letter in enumerate("KMGT")}


def size_in_bytes(size: int | str) -> int:
    """`5_000_000`, "5MB" (decimal) or "5MiB" (binary) as a number of bytes.

    Raises:
        CheckpointError: something else.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if match and match[2].upper() in _UNITS:
            size = int(float(match[1]) * _UNITS[match[2].upper()])
    if type(size) is not int or size <= 0:
        raise CheckpointError(
            f"max_shard_size={size!r} is not a size; give a positive int of bytes, or a string such as '5MB' or '2GiB'"
        )
    return size


@dataclass(frozen=True)
class Weights:
    """A model's tensors, each once, and the further names of tied ones."""

    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def split_aliases(state: Mapping[str, Any], where: str) -> Weights:
    """Tell tensors from their further names.

    Raises:
        CheckpointError: a value is no plain tensor.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_by_memory: dict[Any, str] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{where}{key} is a {type(value).__name__}, and safetensors holds only tensors; save it with "
                "safe_serialization=False"
            )
        tensor = check_storable(value, f"{where}{key}")
        memory = same_memory_key(tensor)
        first = key if memory is None else first_by_memory.setdefault(memory, key)
        if first == key:
            tensors[key] = tensor
        else:
            aliases[key] = first
    return Weights(tensors, aliases)


def plan_shards(tensors: Mapping[str, Tensor], limit_bytes: int) -> list[list[str]]:
    """Names by shard, in order: tensors of at most `limit_bytes` together, or a single larger one."""
    shards: list[list[str]] = []
    open_shard, open_bytes = -1, 0
    for name, tensor in tensors.items():
        if tensor.nbytes > limit_bytes:
            shards.append([name])
        elif open_shard >= 0 and open_bytes + tensor.nbytes <= limit_bytes:
            shards[open_shard].append(name)
            open_bytes += tensor.nbytes
        else:
            shards.append([name])
            open_shard, open_bytes = len(shards) - 1, tensor.nbytes
    return shards or [[]]


@dataclass(frozen=True)
class WeightsName:
    """How the files of one kind of weights are called.

    Args:
        pattern: with `{suffix}` where a shard's number goes.
    """

    pattern: str

    @property
    def single(self) -> str:
        return self.pattern.format(suffix="")

    @property
    def index(self) -> str:
        return f"{self.single}.index.json"

    def shard(self, number: int, count: int, generation: int = 1) -> str:
        """The n-th of `count` shards, from 1; generations tell two sets of equally many shards apart."""
        version = "" if generation == 1 else f"-v{generation}"
        return self.pattern.format(suffix=f"{version}-{number:05d}-of-{count:05d}")

    def is_shard(self, name: str) -> bool:
        """Whether a file is a shard of any set of this name."""
        before, after = map(re.escape, self.pattern.split("{suffix}"))
        return re.fullmatch(rf"{before}(-v\d+)?-\d{{5}}-of-\d{{5}}{after}", name) is not None

    def stale(self, names: Sequence[str], keep: Sequence[str]) -> list[str]:
        """Which of a directory's files belong to an older set; its index first, so that no index lacks its shards."""
        old = [n for n in names if n not in keep and (n in (self.single, self.index) or self.is_shard(n))]
        return sorted(old, key=lambda name: name != self.index)
