"""Generators of a loader: the one that decides the order, and the one that seeds workers."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from accel_state import RNGType
from accel_state.devices import BY_NAME
from accel_state.errors import DataLoaderError


def drawn_generator() -> torch.Generator:
    """A generator seeded by one draw from torch's global one, so that `set_seed` decides it."""
    return torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))


def worker_seed(order_state: Tensor | None, epoch: int, consumed: int, rank: int) -> int:
    """The base seed of a pass's workers: a digest of where the pass begins, so that no generator is advanced for it.

    Args:
        order_state: state of the generator that decides the order; without one, torch's initial seed stands in.
        epoch, consumed: the pass's first position, so that a resumed pass does not repeat its first draws.
        rank: so that ranks augment differently.
    """
    source = torch.initial_seed()
    if order_state is not None:
        twin = torch.Generator()
        twin.set_state(order_state)
        source = int(torch.empty((), dtype=torch.int64).random_(generator=twin).item())
    digest = hashlib.blake2b(f"{source},{epoch},{consumed},{rank}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1


def checked_kinds(rng_types: Any) -> list[RNGType]:
    """The generators that are listed.

    Raises:
        DataLoaderError: no list, an unknown kind, or one of a device that is not here.
    """
    allowed = [kind for kind in RNGType if kind.value in ("generator", "torch") or _is_here(kind.value)]
    if isinstance(rng_types, list | tuple):
        wanted = [getattr(kind, "value", kind) for kind in rng_types]
        if all(kind in [each.value for each in allowed] for kind in wanted):
            return [RNGType(kind) for kind in wanted]
    raise DataLoaderError(
        f"rng_types={rng_types!r} is not possible here: it is a list of {', '.join(kind.value for kind in allowed)}; "
        "kinds of devices that are not here cannot be synchronised."
    )


def _is_here(device: str) -> bool:
    kind = BY_NAME.get(device)
    return kind is not None and kind.is_available()


def shared_seed(on_all_ranks: bool) -> int:
    """The seed that torch was last seeded with, on rank 0 where ranks share it. One small broadcast for that."""
    seed = torch.initial_seed() & (2**63 - 1)  # that of int64
    if on_all_ranks and torch.distributed.is_available() and torch.distributed.is_initialized():
        from accel_state import broadcast

        return int(broadcast(torch.tensor(seed)))
    return seed


def synchronize(rng_types: list[Any], generator: torch.Generator | None) -> None:
    """Set the listed generators to rank 0's. One small broadcast per kind; none without a process group.

    "generator" costs nothing where the order is not random.
    """
    kinds = [kind for kind in rng_types if str(getattr(kind, "value", kind)) != "generator" or generator is not None]
    if kinds and torch.distributed.is_available() and torch.distributed.is_initialized():
        from accel_state import synchronize_rng_states

        synchronize_rng_states(kinds, generator)
