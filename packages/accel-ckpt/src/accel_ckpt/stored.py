"""A tensor of a checkpoint, read from mapped files into whatever placement the live tensor has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from .boxes import Box, box_of, empty_beside, local_part, whole_box
from .manifest import Manifest, data_path
from .tensors import DTYPES, read_tensors


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A saved tensor.

    Args:
        dtype, shape: of the whole.
        pieces: boxes, and views of the files that hold them.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[Box, Tensor], ...]

    @property
    def is_whole(self) -> bool:
        return len(self.pieces) == 1 and self.pieces[0][0].shape == self.shape

    def whole(self) -> Tensor:
        """All of it: a view of the mapped file if it lies in one piece, else put together in memory."""
        if self.is_whole:
            return self.pieces[0][1]
        found = torch.empty(self.shape, dtype=self.dtype)
        self._copy(found, whole_box(self.shape))
        return found

    def fill(self, live: Tensor) -> Tensor:
        """Write this rank's part over that of a live tensor of the same shape; reads no other part."""
        with torch.no_grad():
            self._copy(local_part(live), box_of(live))
        return live

    def beside(self, tensor: Tensor) -> Tensor:
        """A new tensor that lies as another one of the same shape does, on its device and mesh."""
        return self.fill(empty_beside(tensor, self.dtype))

    def has_shape_of(self, live: object) -> TypeGuard[Tensor]:
        """Whether a live tensor has the saved one's shape, and memory that can be written to."""
        return (
            isinstance(live, Tensor)
            and not torch.nn.parameter.is_lazy(live)
            and tuple(live.shape) == self.shape
            and not live.is_meta
        )

    def _copy(self, target: Tensor, wanted: Box) -> None:
        for box, view in self.pieces:
            if common := wanted.common(box):
                common.of(target, wanted).copy_(common.of(view, box))


class Wholes(Mapping[str, Tensor]):
    """Saved tensors by key, each put together when it is asked for."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = stored

    def __getitem__(self, key: str) -> Tensor:
        return self._stored[key].whole()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def open_tensors(directory: Path, manifest: Manifest, names: list[str]) -> dict[str, dict[str, Stored]]:
    """Map the files that hold some objects' tensors; nothing is read until it is used.

    Raises:
        CheckpointCorruptError: a file holds something else than the manifest says.
    """
    by_file: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for entry in manifest.objects.values():
        for key, tensor in entry.tensors.items():
            for piece in tensor.pieces:
                by_file.setdefault(piece.file, {})[key] = (tensor.dtype, piece.box.shape)
    wanted = {name: manifest.objects[name].tensors for name in names}
    files = {piece.file for tensors in wanted.values() for tensor in tensors.values() for piece in tensor.pieces}
    read = {file: read_tensors(data_path(directory, file), by_file[file]) for file in sorted(files)}
    return {
        name: {
            key: Stored(
                dtype=DTYPES[tensor.dtype],
                shape=tensor.shape,
                pieces=tuple((piece.box, read[piece.file][key]) for piece in tensor.pieces),
            )
            for key, tensor in tensors.items()
        }
        for name, tensors in wanted.items()
    }
