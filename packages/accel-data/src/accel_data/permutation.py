"""Shuffled orders that are computed, not stored: any part of the order of any number of samples, at once.

A position is written as two digits, `left * b + right` with `left < a` and `right < b`, and each round adds to one of
them a keyed hash of the other: a Feistel network (M. Luby, C. Rackoff, "How to construct pseudorandom permutations from
pseudorandom functions", SIAM J. Comput. 17, 1988) in the form for any domain (J. Black, P. Rogaway, "Ciphers with
arbitrary finite domains", CT-RSA 2002, method 3): a bijection of `range(a * b)` whatever the hash is. With a and b next
to the root of the length, less than one number in `b` falls outside; it is sent through again until it falls inside,
which keeps the bijection (cycle walking, method 2 there). Not meant to keep secrets.
"""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data import Sampler

from accel_state.errors import DataLoaderError

MAX_LENGTH = 2**63 - 1  # indices are int64

_ROUNDS = 10  # with 6, orders of less than 20 samples are visibly uneven; even, so that the digits end in their places
_WORD = 2**64 - 1
_HALF = 2**32 - 1
_MULTIPLY = 0x9E3779B97F4A7C15  # odd and without pattern: 2**64 over the golden ratio
_HIGH = 2**31 - 1  # the 31 bits of a hash that are used: times a digit's size they stay below 2**63
_FEW = 64  # numbers of which a trip as a tensor costs more than one after the other
_BLOCK = 8192  # indices computed at a time while iterating


@dataclass(frozen=True)
class SampleOrder:
    """A shuffle of `range(length)` that is a function of (seed, epoch), in O(1) memory.

    `order[i]` is the i-th sample's index, `order[i:j]` a run of them as an int64 tensor, `order.at(positions)` those at
    any positions. About 0.1 µs per index in long runs, a few µs for a single one.

    Args:
        length: samples, 0 to 2**63 - 1.
        seed: any integer.
        epoch: each has an order of its own.

    Raises:
        DataLoaderError: a length out of range.
    """

    length: int
    seed: int
    epoch: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.length <= MAX_LENGTH:
            raise DataLoaderError(f"An order of {self.length} samples was asked for; 0 to {MAX_LENGTH} are possible.")

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> Tensor: ...
    def __getitem__(self, key: int | slice) -> int | Tensor:
        if isinstance(key, slice):
            positions = range(*key.indices(self.length))
            if not positions:
                return torch.empty(0, dtype=torch.int64)
            return self.at(torch.arange(positions.start, positions.stop, positions.step))
        key = operator.index(key)
        if not -self.length <= key < self.length:
            raise IndexError(f"position {key} of an order of {self.length} samples")
        return self._inside(self._once(key % self.length))

    def __iter__(self) -> Iterator[int]:
        for first in range(0, self.length, _BLOCK):
            yield from self[first : first + _BLOCK].tolist()

    def at(self, positions: Tensor) -> Tensor:
        """The indices, int64, of the samples at `positions`: integers, any shape, each within 0 and length - 1.

        Raises:
            TypeError: positions that are no integers.
            IndexError: a position out of range.
        """
        positions = torch.as_tensor(positions)
        if positions.numel() == 0:
            return torch.empty(positions.shape, dtype=torch.int64)
        if positions.dtype is torch.bool or positions.is_floating_point() or positions.is_complex():
            raise TypeError(f"positions of samples are integers, not {positions.dtype}")
        positions = positions.to(torch.int64)
        lowest, highest = (int(bound) for bound in positions.aminmax())
        if lowest < 0 or highest >= self.length:
            raise IndexError(f"positions {lowest} to {highest} of an order of {self.length} samples")
        found = self._all_once(positions.reshape(-1))
        outside = (found >= self.length).nonzero().view(-1)
        while outside.numel() > _FEW:
            walked = self._all_once(found[outside])
            found[outside] = walked
            outside = outside[walked >= self.length]
        if outside.numel():
            found[outside] = torch.tensor([self._inside(index) for index in found[outside].tolist()])
        return found.view(positions.shape)

    def shard(
        self, index: int, count: int, batch_size: int, *, drop_last: bool = False, even_batches: bool = True
    ) -> Any:
        """One rank's batches of this order, with a position: an `OrderShard`.

        Args:
            index, count: this rank, of so many.
            batch_size, drop_last, even_batches: as in `prepare_data_loader`.
        """
        from .order_shard import OrderShard  # which needs this module

        return OrderShard(self, index, count, batch_size, drop_last=drop_last, even_batches=even_batches)

    # ---- the network

    @cached_property
    def _digits(self) -> tuple[int, int]:
        """How many values the left and the right digit have."""
        left = max(isqrt(max(self.length - 1, 0)) + 1, 1)
        return left, max(-(-self.length // left), 1)

    @cached_property
    def _keys(self) -> tuple[tuple[int, int], ...]:
        """Factor and summand of each round's hash: 64-bit numbers."""
        said = f"accel_data.SampleOrder 1,{self.seed},{self.epoch}".encode()
        numbers = struct.unpack(f"<{2 * _ROUNDS}Q", hashlib.shake_128(said).digest(16 * _ROUNDS))
        return tuple(zip(numbers[::2], numbers[1::2], strict=True))

    def _inside(self, index: int) -> int:
        """Walk on from a number that may lie outside the order, to the first that does not."""
        while index >= self.length:
            index = self._once(index)
        return index

    def _once(self, position: int) -> int:
        """One trip of one number; the same arithmetic as `_all_once`."""
        size, num_right = self._digits
        digit, other = divmod(position, num_right)
        other_size = num_right
        for factor, summand in self._keys:
            mixed = other * factor + summand & _WORD
            digit += (((mixed ^ mixed >> 32) * _MULTIPLY & _WORD) >> 33) * size >> 31
            if digit >= size:
                digit -= size
            digit, other, size, other_size = other, digit, other_size, size
        return digit * num_right + other

    def _all_once(self, positions: Tensor) -> Tensor:
        """One trip of many numbers. Products wrap at 64 bits; a shift is masked, since that of int64 keeps the sign."""
        size, num_right = self._digits
        digit = torch.div(positions, num_right, rounding_mode="floor")
        other = positions - digit * num_right
        other_size = num_right
        for factor, summand in self._keys:
            mixed = (other * _signed(factor)).add_(_signed(summand))
            mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_HALF)).mul_(_signed(_MULTIPLY))
            mixed.bitwise_right_shift_(33).bitwise_and_(_HIGH).mul_(size)
            mixed.bitwise_right_shift_(31).add_(digit).sub_(size)  # negative where nothing is carried
            mixed.add_((mixed >> 63).bitwise_and_(size))
            digit, other, size, other_size = other, mixed, other_size, size
        return digit.mul(num_right).add_(other)


class PermutationSampler(Sampler[int]):
    """A random sampler by `SampleOrder`: no memory, and any place in the order at once. For loaders of any size.

    Args:
        data_source: what is sampled; its length counts. Or that length.
        seed: by default the one torch was last seeded with, so that `set_seed` decides.
    """

    def __init__(self, data_source: Any, seed: int | None = None) -> None:
        self.data_source = data_source
        self.initial_seed: int = torch.initial_seed() if seed is None else seed
        self.epoch = 0

    @property
    def order(self) -> SampleOrder:
        """The order of the current epoch."""
        return SampleOrder(len(self), self.initial_seed, self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from self.order
        self.epoch += 1

    def __len__(self) -> int:
        return self.data_source if isinstance(self.data_source, int) else len(self.data_source)


def _signed(number: int) -> int:
    """A 64-bit number as torch's int64 has it."""
    return number - 2**64 if number >= 2**63 else number
