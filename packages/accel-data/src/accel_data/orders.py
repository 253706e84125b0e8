"""The order of an epoch as one value, for the samplers whose order can be had without iterating them.

Draws are torch's own (`torch.utils.data.sampler`): the same generator in the same state gives the same order as
iterating the sampler, and leaves the generator in the same state once `finish_order` was called.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from .permutation import PermutationSampler, SampleOrder
from .samplers import SeedableRandomSampler

Order: TypeAlias = range | Tensor | SampleOrder
"""Indices of an epoch: a range, an int64 tensor of shape (length,), or a function of the position."""

_RANDPERM_USES_64_BITS = 2**32 // 20  # from this length on, torch draws otherwise
_IN_VAIN_CHUNK = 2**20
_WITH_REPLACEMENT_CHUNK = 32  # torch draws that many at a time; part of the order's definition


def draw_order(sampler: Iterable[Any]) -> Order | None:
    """The order that iterating `sampler` now would give, or None if only iterating it can tell.

    Costs one `torch.randperm` (or multinomial) for random samplers, nothing for sequential ones. Subclasses may yield
    anything, so only the exact types are known.
    """
    kind = type(sampler)
    if kind is SequentialSampler:
        return range(len(sampler))  # type: ignore[arg-type]
    if kind is PermutationSampler:
        return sampler.order  # type: ignore[attr-defined,no-any-return]
    if kind in (RandomSampler, SeedableRandomSampler):
        return _draw_random(sampler)  # type: ignore[arg-type]
    if kind is WeightedRandomSampler:
        return torch.multinomial(
            sampler.weights,  # type: ignore[attr-defined]
            sampler.num_samples,  # type: ignore[attr-defined]
            sampler.replacement,  # type: ignore[attr-defined]
            generator=sampler.generator,  # type: ignore[attr-defined]
        )
    if kind is SubsetRandomSampler:
        return _draw_subset(sampler)  # type: ignore[arg-type]
    return None


def finish_order(sampler: Iterable[Any]) -> None:
    """Draw what iterating the sampler to its end would still have drawn, so that the next epoch's order is torch's.

    `RandomSampler` draws one more permutation after the last whole one and cuts it to nothing.
    """
    if type(sampler) is RandomSampler and not sampler.replacement:
        n = len(sampler.data_source)
        if n and sampler.num_samples % n == 0:
            _draw_permutation_in_vain(n, sampler.generator)


def _draw_permutation_in_vain(n: int, generator: torch.Generator | None) -> None:
    """Leave the generator as `torch.randperm(n)` does, at a tenth of its time: the draws without the shuffling."""
    if n >= _RANDPERM_USES_64_BITS or not _permutations_draw_32_bits():
        torch.randperm(n, generator=generator)
        return
    spare = torch.empty(min(n, _IN_VAIN_CHUNK), dtype=torch.int32)
    for first in range(0, n - 1, _IN_VAIN_CHUNK):
        spare[: min(_IN_VAIN_CHUNK, n - 1 - first)].random_(generator=generator)


@cache
def _permutations_draw_32_bits() -> bool:
    """Whether this torch draws n - 1 numbers of 32 bits for a permutation of n; seen from where a generator ends."""
    shuffled, drawn = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    torch.randperm(1000, generator=shuffled)
    torch.empty(999, dtype=torch.int32).random_(generator=drawn)
    return torch.equal(shuffled.get_state(), drawn.get_state())


def _draw_random(sampler: RandomSampler) -> Tensor:
    n, wanted, generator = len(sampler.data_source), sampler.num_samples, sampler.generator
    if n == 0:
        return torch.empty(0, dtype=torch.int64)
    if generator is None:  # as torch: one draw from the global generator seeds the epoch
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    if sampler.replacement:
        sizes = [_WITH_REPLACEMENT_CHUNK] * (wanted // _WITH_REPLACEMENT_CHUNK) + [wanted % _WITH_REPLACEMENT_CHUNK]
        return torch.cat([torch.randint(n, (size,), dtype=torch.int64, generator=generator) for size in sizes])
    if wanted == n:
        return torch.randperm(n, generator=generator)
    parts = [torch.randperm(n, generator=generator) for _ in range(-(-wanted // n))]
    return torch.cat(parts)[:wanted]


def _draw_subset(sampler: SubsetRandomSampler) -> Tensor | None:
    """None where the indices are not plain integers: they may then be keys of any kind."""
    indices = sampler.indices
    if not isinstance(indices, Tensor) and not all(type(index) is int for index in indices):
        return None
    permutation = torch.randperm(len(indices), generator=sampler.generator)
    return torch.as_tensor(indices, dtype=torch.int64)[permutation]
