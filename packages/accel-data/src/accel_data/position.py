"""Where a loader stands in the global order, as plain data that means the same on any number of ranks and workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from accel_state.errors import DataLoaderError, DataStateError

from .digest import SampleDigest
from .shard_places import ShardPlaces

STATE_VERSION = 1
_WHOLE_NUMBERS = {"epoch", "length", "num_processes", "num_workers", "seed", "sample_seed"}

OrderKind = Literal["fixed", "generator", "seedable", "permutation"]
"""What decides the order of an epoch: nothing (or the sampler itself), a generator's state, (seed, epoch) by way of a
generator, or (seed, epoch) by way of a `SampleOrder`."""


def require_count(num_batches: Any) -> None:
    """Refuse a number of batches to skip that is no whole number from 0."""
    if not isinstance(num_batches, int) or num_batches < 0:
        raise DataLoaderError(f"Cannot skip {num_batches!r} batches; it has to be a whole number of at least 0.")


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in an epoch.

    Args:
        epoch: which one, counted from 0.
        consumed: units of the order (samples, or batches of an unknown batch sampler) that the user has received.
        generator_state: the sampler's generator as it was before this epoch's order was drawn.
        shards: the place in each shard, of a data set that is read in shards.
        source_state: of an iterable data set that tells it.
    """

    epoch: int = 0
    consumed: int = 0
    generator_state: Tensor | None = None
    shards: ShardPlaces | None = None
    source_state: Any = None


@dataclass
class Pass:
    """One iteration over a loader, open, abandoned or finished."""

    origin: Position
    units_per_step: int
    num_units: int | None
    served: int = 0
    feed: Any = None  # what is being read
    is_counted: bool = False  # whether its samples are in the cursor's digest

    @property
    def position(self) -> Position:
        """What the user has received so far. Padding at the end is not counted."""
        consumed = self.origin.consumed + self.served * self.units_per_step
        if self.num_units is not None:
            consumed = min(consumed, max(self.num_units, self.origin.consumed))
        shards = getattr(self.feed, "places", None)  # of a data set in shards
        source_state = getattr(self.feed, "source_state", None)  # of a stream that tells it
        return replace(self.origin, consumed=consumed, shards=shards, source_state=source_state)


@dataclass
class Cursor:
    """The progress that a loader shares with those that `skip_first_batches` makes from it."""

    epoch: int = 0
    resume: Position | None = None  # loaded, to be continued by the next iteration
    current: Pass | None = field(default=None, repr=False)  # the pass opened last, until it is finished
    digest: SampleDigest = field(default_factory=SampleDigest)  # of passes that are over
    sample_seed: int | None = None  # what seeds samples where no generator or seed decides the order


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What has to agree between the loader that saved a position and the one that continues it."""

    order: OrderKind
    unit: Literal["samples", "batches", "steps"]
    length: int | None
    batch_size: int | None
    num_processes: int
    world_bound: bool = False  # whether a position only fits as many ranks
    num_workers: int | None = None  # where each worker reads a stream of its own, so that a position only fits as many
    num_shards: int | None = None  # of a data set that is read in shards
    rank_alone: int | None = None  # of a rank that only knows where its own shards stand


def state_of(
    position: Position, fingerprint: Fingerprint, seed: int | None, sample_seed: int | None = None
) -> dict[str, Any]:
    """Plain data: integers, strings, a list of integers and one uint8 tensor, and what a data set tells as its state.

    Entries that do not apply are left out.
    """
    state: dict[str, Any] = {
        "version": STATE_VERSION,
        "order": fingerprint.order,
        "epoch": position.epoch,
        f"{fingerprint.unit}_consumed": position.consumed,
        "num_processes": fingerprint.num_processes,
    }
    optional = {
        "length": fingerprint.length,
        "batch_size": fingerprint.batch_size,
        "num_workers": fingerprint.num_workers,
        "seed": seed,
        "sample_seed": sample_seed,
        "generator_state": position.generator_state,
        "source_state": position.source_state,
        "rank": fingerprint.rank_alone,
    }
    if fingerprint.num_shards is not None:
        optional |= (position.shards or ShardPlaces.start(fingerprint.num_shards)).state()
    return state | {key: value for key, value in optional.items() if value is not None}


def check_form(state: Any) -> None:
    """Raise DataStateError unless `state` has the form of a loader's state, of a version that is known here."""
    if not isinstance(state, Mapping):
        raise DataStateError(f"A loader's state is a dict that its state_dict() gave, not a {type(state).__name__}.")
    version = state.get("version")
    if not isinstance(version, int):
        raise DataStateError(f"This is no state of a loader: it has no version, only the entries {sorted(state)}.")
    if version > STATE_VERSION:
        raise DataStateError(
            f"The loader's state has version {version}; this accel-data reads up to {STATE_VERSION}. Update accel-data."
        )
    for key, value in state.items():
        if (key in _WHOLE_NUMBERS or key.endswith("_consumed")) and type(value) is not int:
            raise _malformed(key, value, "a whole number")
    if "epoch" not in state:
        raise _malformed("epoch", None, "a whole number")


def position_of(state: Mapping[str, Any], fingerprint: Fingerprint) -> Position:
    """The position in a saved state.

    Raises:
        DataStateError: the state is malformed, from a newer version, or of other data than `fingerprint`.
    """
    check_form(state)
    key = f"{fingerprint.unit}_consumed"
    if key not in state:
        raise DataStateError(
            f"The loader's state does not count {fingerprint.unit} (entries: {sorted(state)}), so it was saved from a "
            "loader with another kind of batch sampler. Load it into a loader made the same way."
        )
    _check_same_data(state, fingerprint)
    epoch, consumed = state["epoch"], state[key]
    if epoch < 0 or consumed < 0 or (consumed and fingerprint.length is not None and consumed > fingerprint.length):
        raise DataStateError(
            f"The loader's state names epoch {epoch} and {consumed} {fingerprint.unit} consumed; this loader has "
            f"{fingerprint.length} {fingerprint.unit}."
        )
    return Position(
        epoch=epoch,
        consumed=consumed,
        generator_state=_generator_state(state, fingerprint),
        shards=ShardPlaces.from_state(state, fingerprint.num_processes),
        source_state=state.get("source_state"),
    )


def _malformed(key: str, value: Any, wanted: str) -> DataStateError:
    said = "no" if value is None else f"{value!r} as"
    return DataStateError(
        f"The loader's state is malformed: it has {said} {key!r}, which has to be {wanted}. "
        "Load what state_dict() gave."
    )


def _generator_state(state: Mapping[str, Any], fingerprint: Fingerprint) -> Tensor | None:
    """The state of the generator that the order is drawn from; None where there is none."""
    if fingerprint.order in ("seedable", "permutation") and "seed" not in state:
        raise _malformed("seed", None, "a whole number")
    saved = state.get("generator_state")
    if saved is None and fingerprint.order != "generator":
        return None
    try:
        torch.Generator().set_state(saved)  # type: ignore[arg-type]
    except (RuntimeError, TypeError) as error:
        shown = None if saved is None else f"{type(saved).__name__} of {getattr(saved, 'shape', '?')}"
        raise _malformed("generator_state", shown, "the uint8 tensor of a torch.Generator on the CPU") from error
    return saved


def _num_shards(state: Mapping[str, Any]) -> int | None:
    positions = state.get("shard_positions", ())
    if not isinstance(positions, list | tuple) or any(type(position) is not int for position in positions):
        raise _malformed("shard_positions", positions, "a list of whole numbers")
    return len(positions) or None


def _check_same_data(state: Mapping[str, Any], fingerprint: Fingerprint) -> None:
    saved_length, length = state.get("length"), fingerprint.length
    is_inside = state[f"{fingerprint.unit}_consumed"] > 0
    if saved_length != length and (is_inside or fingerprint.unit != "batches"):  # whose number may depend on the epoch
        raise DataStateError(
            f"The loader's state was saved over {saved_length} {fingerprint.unit}, but this loader has {length}: "
            "a position in one data set means nothing in another. Load the data that the state was saved with."
        )
    if state.get("order") != fingerprint.order:
        raise DataStateError(
            f"The loader's state is of a {state.get('order')!r} order, but this loader's order is "
            f"{fingerprint.order!r}. Prepare the loader with the same shuffle, sampler and use_seedable_sampler."
        )
    if fingerprint.world_bound and is_inside and state.get("num_processes") != fingerprint.num_processes:
        raise DataStateError(
            f"The loader's state was saved on {state.get('num_processes')} ranks, this is a run of "
            f"{fingerprint.num_processes}: the position of a stream read by workers only fits as many. Use as many "
            "ranks, or num_workers=0 when saving and loading."
        )
    saved_workers = state.get("num_workers")
    if is_inside and saved_workers != fingerprint.num_workers:
        raise DataStateError(
            f"The loader's state was saved with num_workers={saved_workers}, but this loader has "
            f"{fingerprint.num_workers}: each worker reads a stream of its own, so its position only fits as many. Use "
            "as many workers, or num_workers=0 when saving and loading."
        )
    num_shards = _num_shards(state)
    if num_shards != fingerprint.num_shards:
        raise DataStateError(
            f"The loader's state has positions in {num_shards} shards, but this data set comes in "
            f"{fingerprint.num_shards}. Load it with the files, or number of shards, that it was saved with."
        )
    alone = state.get("rank")
    if alone is not None and (alone, state.get("num_processes")) != (fingerprint.rank_alone, fingerprint.num_processes):
        raise DataStateError(
            f"The loader's state holds only the shards of rank {alone} of {state.get('num_processes')}: without a "
            "process group, that rank could not know the others'. Load it on the same rank of as many."
        )
    saved_size = state.get("batch_size")
    if fingerprint.unit == "batches" and saved_size != fingerprint.batch_size:
        raise DataStateError(
            f"The loader's state counts batches of {saved_size} samples, but this batch sampler makes batches of "
            f"{fingerprint.batch_size}. Use the same batch size; another one is only exact with torch's BatchSampler."
        )
