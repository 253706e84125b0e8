"""Which samples were seen, as one number that can be added up over ranks and over parts of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MULTIPLY = 0x9E3779B97F4A7C15 - 2**64, 0xD6E8FEB86659FD93 - 2**64
_HALF = 2**32 - 1


@dataclass(frozen=True)
class SampleDigest:
    """A digest of samples at their places in the order.

    Equal runs have equal digests; those of all ranks, and of the parts of a run that was resumed, add up to that of the
    whole run, on any number of ranks. Fill-up samples do not count.

    Args:
        num_samples: how many.
        value: a 64-bit number: the sum of a hash of (epoch, place in the epoch's order, index) over them.
    """

    num_samples: int = 0
    value: int = 0

    def __add__(self, other: SampleDigest) -> SampleDigest:
        return SampleDigest(self.num_samples + other.num_samples, (self.value + other.value) % 2**64)

    def __str__(self) -> str:
        return f"{self.num_samples}:{self.value:016x}"


def digest_of(epoch: int, places: Tensor, indices: Tensor) -> SampleDigest:
    """The digest of some samples of an epoch.

    Args:
        places, indices: int64 of one length: where in the order, and what stands there.
    """
    mixed = _mix(_mix(_mix(torch.full_like(places, epoch)) ^ places) ^ indices)
    return SampleDigest(len(indices), int(mixed.sum()) % 2**64)


def _mix(numbers: Tensor) -> Tensor:
    """A bijection of 64-bit numbers in which every bit depends on every other."""
    for factor in _MULTIPLY:
        numbers = (numbers + 1) * factor
        numbers = numbers ^ ((numbers >> 32) & _HALF)
    return numbers
