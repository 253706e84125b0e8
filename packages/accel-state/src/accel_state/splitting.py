"""One process's part of a list, tuple, dict, tensor or data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def part_bounds(length: int, process_index: int, num_processes: int) -> tuple[int, int]:
    """Start and end of a contiguous part; the first parts are one longer where it does not divide."""
    each, longer = divmod(length, num_processes)
    start = process_index * each + min(process_index, longer)
    return start, start + each + (process_index < longer)


def split_part(inputs: Any, process_index: int, num_processes: int, apply_padding: bool = False) -> Any:
    """The part of `inputs` that belongs to one process, of the same type.

    Args:
        inputs: a list, tuple, tensor, data set with `select`, or a dict of them, all of one length; anything else is
            returned whole.
        process_index: whose part.
        num_processes: how many parts.
        apply_padding: repeat the last element so that all parts are equally long.

    Raises:
        ValueError: the values of a dict differ in length; names keys and lengths.
    """
    if num_processes == 1:
        return inputs
    if type(inputs) is list and not apply_padding:  # the usual case; asking for a Mapping takes longer
        start, end = part_bounds(len(inputs), process_index, num_processes)
        return inputs[start:end]
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"the values of a dict are split together, so they need the same length; these have {lengths}"
            )
        parts = {key: split_part(value, process_index, num_processes, apply_padding) for key, value in inputs.items()}
        return parts if type(inputs) is dict else type(inputs)(parts)  # type: ignore[call-arg]
    if not _is_divisible(inputs):
        return inputs
    length = len(inputs)
    start, end = part_bounds(length, process_index, num_processes)
    missing = -(-length // num_processes) - (end - start) if apply_padding and length else 0
    return _take(inputs, start, end, missing)


def _is_divisible(inputs: Any) -> bool:
    if isinstance(inputs, torch.Tensor):
        return inputs.ndim > 0
    return isinstance(inputs, (list, tuple)) or hasattr(inputs, "select")


def _take(inputs: Any, start: int, end: int, missing: int) -> Any:
    if isinstance(inputs, torch.Tensor):
        part = inputs[start:end]
        return torch.cat([part, inputs[-1:].expand(missing, *inputs.shape[1:])]) if missing else part
    if isinstance(inputs, (list, tuple)):
        items: Any = inputs  # a slice of a named tuple is a plain one: its fields would no longer fit
        return items[start:end] + items[-1:] * missing
    return inputs.select([*range(start, end), *[len(inputs) - 1] * missing])


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
