"""Who writes what: every part of every tensor once, decided alike on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from accel_state.errors import CheckpointError

from .boxes import Box, box_of, is_sharded, local_part, overlap, whole_box
from .names import STATE_TENSORS_NAME, shard_file
from .objects import Captured
from .tensors import Piece, TensorEntry, dtype_name

Layout = Mapping[str, Mapping[str, Box]]
"""Object -> key -> the box that a rank holds: of its sharded tensors, and of all tensors of objects in parts."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What goes where.

    Args:
        entries: object -> key -> the manifest's entry.
        writers: rank -> file -> the (object, key) pairs whose box that rank writes into it; ranks without work are
            left out.
    """

    entries: Mapping[str, Mapping[str, TensorEntry]]
    writers: Mapping[int, Mapping[str, Sequence[tuple[str, str]]]]

    def tensors_of(self, rank: int, objects: Mapping[str, Captured]) -> dict[str, dict[str, Tensor]]:
        """File -> key -> this rank's memory of what it writes there."""
        return {
            file: {key: local_part(objects[name].tensors[key]) for name, key in pairs}
            for file, pairs in self.writers.get(rank, {}).items()
        }


def layout_of(objects: Mapping[str, Captured]) -> dict[str, dict[str, Box]]:
    """This rank's boxes; empty where nothing is sharded or in parts."""
    found = {
        name: {
            key: box_of(tensor) for key, tensor in captured.tensors.items() if captured.is_part or is_sharded(tensor)
        }
        for name, captured in objects.items()
    }
    return {name: boxes for name, boxes in found.items() if boxes or objects[name].is_part}


def assign(objects: Mapping[str, Captured], files: Mapping[str, str], layouts: Mapping[int, Layout], main: int) -> Plan:
    """Deal the writing out.

    An object without sharded tensors is written whole, by the main rank. Of one with some, each distinct box is written
    by that one of its holders that has least to write so far; so are its plain tensors, which all ranks hold alike, but
    for those that may differ (buffers), which the main rank writes. Of an object in parts the holders are the ranks
    that have the tensor at all, and of a buffer the first of them writes its own.

    Args:
        objects: what this rank captured, see `put_together`; the same names on all ranks.
        files: object -> the file of its bulk.
        layouts: of the ranks that write this checkpoint, by rank.
        main: the one of them that commits it.

    Raises:
        CheckpointError: ranks hold other tensors than the main one, or parts that do not make up the whole.
    """
    _check_same_tensors(objects, layouts, main)
    entries: dict[str, dict[str, TensorEntry]] = {}
    writers: dict[int, dict[str, list[tuple[str, str]]]] = {}
    load_bytes = dict.fromkeys(layouts, 0)
    for name, captured in objects.items():
        entries[name] = {}
        for key, tensor in captured.tensors.items():
            base = STATE_TENSORS_NAME if key in captured.side else files[name]
            holders = _holders(name, key, captured, layouts, main)
            if holders is None:
                dealt = [(whole_box(tensor.shape), main)]
            else:
                dealt = _deal(holders, tensor.element_size(), load_bytes)
                _check_whole(f"{name}: {key}", tensor, dealt)
            in_shards = name in layouts[main]
            pieces = []
            for box, rank in dealt:
                file = shard_file(base, rank) if in_shards else base
                pieces.append(Piece(file=file, box=box))
                writers.setdefault(rank, {}).setdefault(file, []).append((name, key))
            entries[name][key] = TensorEntry(dtype=dtype_name(tensor), shape=tuple(tensor.shape), pieces=tuple(pieces))
    return Plan(entries=entries, writers=writers)


def _holders(
    name: str, key: str, captured: Captured, layouts: Mapping[int, Layout], main: int
) -> dict[Box, list[int]] | None:
    """The distinct boxes of a tensor and who holds each; None if the main rank writes it whatever the others hold."""
    tensor = captured.tensors[key]
    if captured.is_part:
        return _holders_of_part(name, key, captured, layouts)
    if tensor.numel() == 0 or name not in layouts[main]:
        return None
    if key not in layouts[main][name]:
        return None if key in captured.own else {whole_box(tensor.shape): list(layouts)}
    return _by_box({rank: layout[name][key] for rank, layout in layouts.items()})


def _holders_of_part(name: str, key: str, captured: Captured, layouts: Mapping[int, Layout]) -> dict[Box, list[int]]:
    whole = whole_box(captured.tensors[key].shape)
    boxes = {rank: layout[name][key] for rank, layout in layouts.items() if key in layout[name]}
    first = min(boxes)
    if whole.numel == 0 or (key in captured.own and boxes[first] == whole):
        return {boxes[first]: [first]}
    return _by_box(boxes)


def _by_box(boxes: Mapping[int, Box]) -> dict[Box, list[int]]:
    """Which ranks hold each box, without empty ones."""
    holders: dict[Box, list[int]] = {}
    for rank, box in boxes.items():
        if box.numel:
            holders.setdefault(box, []).append(rank)
    return dict(sorted(holders.items(), key=lambda item: item[0].offset))


def _deal(holders: Mapping[Box, Sequence[int]], itemsize: int, load_bytes: dict[int, int]) -> list[tuple[Box, int]]:
    dealt = []
    for box, ranks in holders.items():
        rank = min(ranks, key=load_bytes.__getitem__)
        load_bytes[rank] += box.numel * itemsize
        dealt.append((box, rank))
    return dealt


def _check_same_tensors(objects: Mapping[str, Captured], layouts: Mapping[int, Layout], main: int) -> None:
    parts = {name for name, captured in objects.items() if captured.is_part}
    held = {
        rank: {(name, key) for name, boxes in layout.items() if name not in parts for key in boxes}
        for rank, layout in layouts.items()
    }
    for rank, pairs in held.items():
        if odd := sorted(held[main] ^ pairs):
            shown = ", ".join(f"{name}: {key}" for name, key in odd[:5])
            raise CheckpointError(
                f"rank {rank} holds other sharded tensors than rank {main}; they differ in {shown}. All ranks save the "
                "same objects, each its part of them."
            )


def _check_whole(where: str, tensor: Tensor, dealt: Sequence[tuple[Box, int]]) -> None:
    held = sum(box.numel for box, _ in dealt)
    if held != tensor.numel() or overlap([box for box, _ in dealt]):
        raise CheckpointError(
            f"{where}: the ranks' parts do not make up the whole of shape {tuple(tensor.shape)}: "
            + ", ".join(f"{box.shape} at {box.offset} (rank {rank})" for box, rank in dealt[:8])
            + ". With save_on_each_node each node needs all of it: shard within nodes, or save to a common file system."
        )
