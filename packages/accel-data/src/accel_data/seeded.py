"""Random transforms that depend on (epoch, sample) alone, not on which process reads a sample, or when."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch


class SeededIndices:
    """Batches of indices, each index with a seed of its own: that is how seeds reach workers, also persistent ones.

    Args:
        batches: lists of indices, or single ones.
        epoch_seed: of this epoch.
    """

    def __init__(self, batches: Iterable[Any], epoch_seed: int) -> None:
        self._batches = batches
        self._epoch_seed = epoch_seed

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield [self._seeded(index) for index in batch] if isinstance(batch, list) else self._seeded(batch)

    def _seeded(self, index: Any) -> tuple[Any, int]:
        digest = hashlib.blake2b(f"{self._epoch_seed},{index}".encode(), digest_size=8).digest()
        return index, int.from_bytes(digest, "little") >> 1


class SeededReads:
    """A map-style data set whose samples are read right after seeding python, numpy and torch for them.

    The generators are put back afterwards, so that reading in the main process does not move them.

    Args:
        dataset: the user's.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, seeded: Any) -> Any:
        if isinstance(seeded, list):  # a sampler of lists: the data set takes them whole
            return self._read([([index for index, _ in seeded], seeded[0][1])])[0]
        return self._read([seeded])[0]

    def __getitems__(self, seeded: list[tuple[Any, int]]) -> list[Any]:
        return self._read(seeded)

    def _read(self, seeded: list[tuple[Any, int]]) -> list[Any]:
        before = random.getstate(), torch.get_rng_state()
        numpy = sys.modules.get("numpy")
        numpy_before = None if numpy is None else numpy.random.get_state()
        try:
            return [self._read_one(index, seed, numpy) for index, seed in seeded]
        finally:
            random.setstate(before[0])
            torch.set_rng_state(before[1])
            if numpy is not None:
                numpy.random.set_state(numpy_before)

    def _read_one(self, index: Any, seed: int, numpy: Any) -> Any:
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        return self.dataset[index]


def epoch_seed(order_state: torch.Tensor | None, fallback: int | None, epoch: int) -> int:
    """The seed of an epoch's samples: a digest of the generator's state at its start, so that a resumed run has it too.

    Args:
        fallback: where no generator decides the order.
    """
    said = str(fallback).encode() if order_state is None else bytes(order_state.tolist())
    digest = hashlib.blake2b(said + f",{epoch}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1
