"""One process's part of a list, tuple, dict, tensor or data set."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Subset


def part_bounds(length: int, process_index: int, num_processes: int) -> tuple[int, int]:
    """Start and end of a contiguous part; the first parts are one longer where it does not divide."""
    each, longer = divmod(length, num_processes)
    start = process_index * each + min(process_index, longer)
    return start, start + each + (process_index < longer)


def split_part(inputs: Any, process_index: int, num_processes: int, apply_padding: bool = False) -> Any:
    """The part of `inputs` that belongs to one process, of the same type.

    Args:
        inputs: a list, tuple, range or other sequence, tensor, numpy array, data set (of torch, or with `select`), or a
            dict of them, all of one length. Part of a torch data set is a `Subset`, of a range with padding a list.
        process_index: whose part.
        num_processes: how many parts.
        apply_padding: repeat the last element so that all parts are equally long.

    Raises:
        ValueError: the values of a dict differ in length; names keys and lengths.
        TypeError: something that has no parts, as a text, a number, a set or a stream.
    """
    if num_processes == 1:
        return inputs
    if type(inputs) is list and not apply_padding:  # the usual case; asking for a Mapping takes longer
        start, end = part_bounds(len(inputs), process_index, num_processes)
        return inputs[start:end]
    if isinstance(inputs, Mapping):
        for key, value in inputs.items():
            _check_divisible(value, f" at key {key!r}")
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"the values of a dict are split together, so they need the same length; these have {lengths}"
            )
        parts = {key: split_part(value, process_index, num_processes, apply_padding) for key, value in inputs.items()}
        return parts if type(inputs) is dict else type(inputs)(parts)  # type: ignore[call-arg]
    _check_divisible(inputs)
    length = len(inputs)
    start, end = part_bounds(length, process_index, num_processes)
    missing = -(-length // num_processes) - (end - start) if apply_padding and length else 0
    return _take(inputs, start, end, missing)


def _check_divisible(inputs: Any, where: str = "") -> None:
    if isinstance(inputs, torch.Tensor) or _is_array(inputs):
        is_divisible = inputs.ndim > 0
    elif isinstance(inputs, (str, bytes, deque)):
        is_divisible = False
    else:
        kinds = (Sequence, Dataset, Mapping)
        is_divisible = hasattr(inputs, "__len__") and (isinstance(inputs, kinds) or hasattr(inputs, "select"))
    if not is_divisible:
        raise TypeError(
            f"split_between_processes got a {type(inputs).__name__}{where} ({inputs!r:.60}), which cannot be split: "
            "give a list, tuple, tensor with a dimension, numpy array, range, sized data set, or a dict of them"
        )


def _is_array(inputs: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(inputs, numpy.ndarray)


def _take(inputs: Any, start: int, end: int, missing: int) -> Any:
    if isinstance(inputs, torch.Tensor):
        part = inputs[start:end]
        return torch.cat([part, inputs[-1:].expand(missing, *inputs.shape[1:])]) if missing else part
    indices = [*range(start, end), *[len(inputs) - 1] * missing]
    if _is_array(inputs):
        return inputs[indices] if missing else inputs[start:end]
    if hasattr(inputs, "select"):
        return inputs.select(indices)
    if isinstance(inputs, Dataset):
        return Subset(inputs, indices)
    if isinstance(inputs, range) and missing:
        return [inputs[index] for index in indices]
    items: Any = inputs  # a slice of a named tuple is a plain one: its fields would no longer fit
    return items[start:end] + items[-1:] * missing if missing else items[start:end]


def drop_padding(gathered: Any, length: int, num_processes: int | None = None) -> Any:
    """What was gathered from padded parts, without the padding: as long as the whole was, in its order.

    Args:
        gathered: of `gather` or `gather_object`, over results of one per item of `split_part(..., apply_padding=True)`:
            a list, tuple or tensor, or a dict of them.
        length: of the whole that was split.
        num_processes: how many parts there were; by default as many as the job has.

    Raises:
        ValueError: another length than all padded parts have together.
    """
    if num_processes is None:
        from accel_state.process_group import current_job

        num_processes = current_job().topology.world_size
    if isinstance(gathered, Mapping):
        kept = {key: drop_padding(value, length, num_processes) for key, value in gathered.items()}
        return kept if type(gathered) is dict else type(gathered)(kept)  # type: ignore[call-arg]
    longest = -(-length // num_processes)
    if len(gathered) != (longest * num_processes if num_processes > 1 else length):
        raise ValueError(
            f"{len(gathered)} items are not what {num_processes} processes give for {length}, which is {longest} each"
        )
    kept_items: list[int] = []
    for rank in range(num_processes):
        start, end = part_bounds(length, rank, num_processes)
        kept_items += range(rank * longest, rank * longest + end - start)
    if isinstance(gathered, torch.Tensor):
        return gathered[kept_items]
    return type(gathered)(gathered[index] for index in kept_items)
