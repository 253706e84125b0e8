"""Random numbers that can be reproduced: seeding, making ranks equal, saving and restoring."""

from __future__ import annotations

import importlib
import operator
import random
from collections.abc import Iterable
from typing import Any

import torch

from accel_state.callsite import warn_user
from accel_state.collectives.operations import broadcast
from accel_state.devices import BY_NAME, CPU, KINDS, live_accelerators
from accel_state.enums import RNGType
from accel_state.errors import DeviceError
from accel_state.process_group import current_job

_NUMPY_LIMIT = 2**32  # numpy takes seeds below this
_TORCH_LIMIT = 2**64  # and torch below this
_MASK = 2**64 - 1

_current_seed: int | None = None


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> int:
    """Seed Python, numpy, torch and every accelerator.

    Args:
        seed: an integer of at least 0 and below 2**64. numpy takes 32 bits and gets the lowest ones: below 2**32
            the seed is the same everywhere.
        device_specific: add the rank, so that ranks differ.
        deterministic: let torch use deterministic algorithms only; one that has none raises when used.

    Returns:
        the seed that was used on this rank.

    Raises:
        TypeError: the seed is not an integer.
        ValueError: it, or with the rank added, is out of range. Nothing was seeded.
    """
    global _current_seed
    seed = _checked_seed(seed, 0)
    of_this_rank = _checked_seed(seed, current_job().topology.rank) if device_specific else seed
    _current_seed, seed = seed, of_this_rank
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed % _NUMPY_LIMIT)
    torch.manual_seed(seed)  # also of the accelerators that torch itself knows, also of those not yet used
    for kind in KINDS:
        if kind.plugin is not None and kind.is_available():
            kind.manual_seed_all(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
    return seed


def _checked_seed(seed: Any, rank: int) -> int:
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"set_seed got {seed!r}, a {type(seed).__name__}: give an integer from 0 to 2**64 - 1")
    number = operator.index(seed) + rank
    if not 0 <= number < _TORCH_LIMIT:
        added = f" and rank {rank} added" if rank else ""
        raise ValueError(
            f"set_seed got seed={seed}{added}, and torch takes seeds from 0 to 2**64 - 1 (numpy below 2**32: it gets "
            "the lowest 32 bits)"
        )
    return number


def current_seed() -> int | None:
    """What `set_seed` was last given, the same on all ranks; None if it was not called."""
    return _current_seed


def seed_for_rank(seed: int, rank: int) -> int:
    """A seed for one rank, below 2**63, that has nothing in common with those of neighbouring ranks and seeds.

    Args:
        seed: of the run.
        rank: of the process.

    Source: splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    return _mix(_mix(seed & _MASK) ^ (rank + 1)) >> 1


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


# ---------------------------------------------------------------- equal on all ranks


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Give every rank the state that rank 0's generator has.

    Args:
        rng_type: which generator; `generator` means the one that is given.
        generator: for `generator`.

    Raises:
        ValueError: an unknown type, or `generator` without a generator.
        DeviceError: no such device here.

    Cost: a broadcast of 5 KB (16 bytes for most accelerators).
    """
    kind = RNGType(rng_type)
    if kind is RNGType.GENERATOR:
        if generator is None:
            raise ValueError("rng_type 'generator' needs the generator whose state is to be shared")
        generator.set_state(broadcast(generator.get_state()))
    elif kind is RNGType.TORCH:
        torch.set_rng_state(broadcast(torch.get_rng_state()))
    else:
        row = BY_NAME[kind.value]
        if not row.is_available():
            raise DeviceError(f"rng_type {kind.value!r}: there is no such device here")
        row.set_rng_state(broadcast(row.rng_state()))


def synchronize_rng_states(rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None) -> None:
    """`synchronize_rng_state` for each of several types."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


# ---------------------------------------------------------------- save and restore


def capture_rng_state() -> dict[str, Any]:
    """The state of every global generator: Python's, numpy's if it is there, torch's, each accelerator's in use.

    Plain integers, floats, texts, lists, and uint8 tensors on the CPU, so that it can be saved without pickle.
    """
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    numpy = _numpy()
    if numpy is not None:
        algorithm, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = {
            "algorithm": str(algorithm),
            "keys": keys.tolist(),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gauss": float(cached),
        }
    for kind in live_accelerators():
        states = kind.rng_states()
        if states:
            state[kind.name] = states
    return state


def restore_rng_state(state: dict[str, Any]) -> None:
    """Continue from `capture_rng_state`; what cannot be restored here is named in a warning.

    Args:
        state: as captured, perhaps by a process with other devices.
    """
    lost = []
    for name, saved in state.items():
        if name == "python":
            random.setstate((saved["version"], tuple(saved["numbers"]), saved["gauss"]))
        elif name == "torch":
            torch.set_rng_state(saved)
        elif name == "numpy":
            lost += _restore_numpy(saved)
        else:
            lost += _restore_kind(name, saved)
    if lost:
        warn_user(f"random state that cannot be restored here: {'; '.join(lost)}")


def _restore_numpy(saved: dict[str, Any]) -> list[str]:
    numpy = _numpy()
    if numpy is None:
        return ["numpy (not installed)"]
    keys = numpy.asarray(saved["keys"], dtype=numpy.uint32)
    numpy.random.set_state((saved["algorithm"], keys, saved["position"], saved["has_gauss"], saved["cached_gauss"]))
    return []


def _restore_kind(name: str, saved: list[torch.Tensor]) -> list[str]:
    kind = BY_NAME.get(name, CPU)
    if kind is CPU or not kind.is_available():
        return [f"{name} (no such device)"]
    if len(saved) != len(kind.rng_states()):
        return [f"{name} (saved for {len(saved)} devices, here are {len(kind.rng_states())})"]
    kind.set_rng_states(saved)
    return []


def _numpy() -> Any:
    """numpy where torch has it, else None; never a reason to fail."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None
