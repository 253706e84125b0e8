"""`DataLoaderShard`: a torch DataLoader that yields one rank's batches and knows exactly where it stands."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from accel_state.errors import DataLoaderError

from .epochs import tell_epoch
from .feeds import Feed, Tail
from .placement import placement
from .position import Cursor, Fingerprint, OrderKind, Pass, Position, position_of, state_of
from .randomness import synchronize, worker_seed
from .samplers import SeedableRandomSampler, innermost_sampler
from .shard import BatchSamplerShard, ItemShard
from .stream import StreamPart

logger = logging.getLogger("accel_data")


class DataLoaderShard(DataLoader):
    """A loader that yields this rank's batches, on a device, and resumes at any of them.

    `prepare_data_loader` makes one from an ordinary loader; that is the usual way. Of several iterators open at once,
    the one opened last is the one whose position counts.

    Args:
        dataset: map-style or iterable.
        device: where batches go; None leaves them where the collate function made them.
        rng_types: generators set to rank 0's at the start of every iteration; the order's own ("generator") by default.
        synchronized_generator: the generator that decides the order, where the sampler has none of its own.
        skip_batches: own batches to leave out at the start of every iteration.
        use_stateful_dataloader: adds nothing: every loader here keeps its exact position.
        _drop_last: adds nothing: the batch sampler says whether a short round is dropped.
        _non_blocking: copy to the device without waiting; effective from pinned memory.
        torch_device_mesh: None; `prepare_data_loader` is what reads a mesh.
        iteration: the epoch to begin with.
        gradient_state: where gradient accumulation looks for the loader being read.
        base_dataloader: the loader that this one was made from; itself by default.
        **kwargs: those of `torch.utils.data.DataLoader`. A `batch_sampler` that is no `BatchSamplerShard` is taken as
            this rank's part already.

    Raises:
        DataLoaderError: `in_order=False`, or a mesh.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        *,
        gradient_state: Any = None,
        base_dataloader: DataLoader | None = None,
        **kwargs: Any,
    ) -> None:
        if torch_device_mesh is not None:
            raise DataLoaderError("A DataLoaderShard does not read a mesh: pass it to prepare_data_loader instead.")
        super().__init__(dataset, **kwargs)
        if not self.in_order:
            raise DataLoaderError(
                "in_order=False delivers batches in an order that nobody knows beforehand, so neither the position nor "
                "the last batch could be told. Use in_order=True."
            )
        self._shard = _own_part(self)
        self._cursor = Cursor(epoch=iteration)
        self._base = base_dataloader
        self._skips_by_hand = False
        self._tail: Tail | None = None

        self.device = None if device is None else torch.device(device)
        self.non_blocking = _non_blocking
        self.rng_types = ["generator"] if rng_types is None else list(rng_types)
        self.skip_batches = skip_batches
        self.use_stateful_dataloader = use_stateful_dataloader
        self.gradient_state = gradient_state
        self.end_of_dataloader = False
        self.remainder = -1

        own = getattr(innermost_sampler(self._shard), "generator", None)
        self.synchronized_generator: torch.Generator | None = synchronized_generator if own is None else own
        self._worker_source: torch.Generator | None = self.synchronized_generator or self.generator
        self.generator = torch.Generator()  # seeds workers; set anew at the start of each pass

    # ---- iterating

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """This rank's batches: the rest of the saved epoch if a state was loaded, else a whole epoch.

        Cost: one broadcast of the generator's state (5 KB) where the order is random and there are several ranks.
        """
        current = self._begin()
        feed = self._shard.open(current.origin.consumed)
        self.end_of_dataloader, self.remainder, self._tail = False, feed.remainder, None
        move = placement(self.device, self.non_blocking)
        mailbox = self.gradient_state
        batches = feed.serve(self._torch_iterator(feed))
        if mailbox is not None:
            mailbox._add_dataloader(self)  # noqa: SLF001
        try:
            for batch in batches:
                current.served += 1
                if current.served == feed.total:
                    self.end_of_dataloader, self.remainder, self._tail = True, feed.remainder, feed.tail
                yield batch if move is None else move(batch)
            self._finish(current)
        finally:
            if mailbox is not None:
                mailbox._remove_dataloader(self)  # noqa: SLF001

    def _begin(self) -> Pass:
        """Open a pass at the saved position or at the next epoch's start, with the generator where it has to be."""
        cursor, generator = self._cursor, self.synchronized_generator
        position = self._starting_point()
        cursor.epoch = position.epoch
        self._tell_epoch(position.epoch)
        if self._shard.num_processes > 1:
            synchronize(self.rng_types, generator)
        state = None if generator is None else generator.get_state()
        source = self._worker_source
        basis = state if source is None or source is generator else source.get_state()
        seed = worker_seed(basis, position.epoch, position.consumed, self._shard.process_index)
        self.generator.manual_seed(seed)
        cursor.current = Pass(
            origin=replace(position, generator_state=state),
            units_per_step=self._shard.units_per_step,
            num_units=self._shard.num_units,
        )
        return cursor.current

    def _starting_point(self) -> Position:
        """Where the next pass begins; uses up a loaded position."""
        cursor = self._cursor
        resume, cursor.resume = cursor.resume, None
        skipped = self._units_to_skip()
        if resume is not None and self._skips_by_hand and self._is_at_end(resume) and not self._is_end(skipped):
            self._leave(resume)  # nothing is left of that epoch, so the batches to skip are the next one's
            resume = None
        if resume is None:
            return Position(epoch=cursor.epoch, consumed=skipped)
        if self.synchronized_generator is not None and resume.generator_state is not None:
            self.synchronized_generator.set_state(resume.generator_state)
        if self._skips_by_hand:
            return replace(resume, consumed=skipped)
        if resume.consumed:
            unit = "samples" if self._shard.counts_samples else "batches"
            length = self._shard.num_units
            logger.info("epoch %d continues after %d of %s %s", resume.epoch, resume.consumed, length or "?", unit)
        return resume

    def _torch_iterator(self, feed: Feed) -> Iterator[Any]:
        """Torch's own iterator, reading indices from `feed`."""
        self._shard.armed = feed
        try:
            return super().__iter__()
        finally:
            self._shard.armed = None

    def _finish(self, current: Pass) -> None:
        """The pass was read to its end: the next one is the next epoch."""
        self.end_of_dataloader = True
        self._shard.finish()
        if self._cursor.current is current:
            self._cursor.current = None
            self._cursor.epoch = current.origin.epoch + 1

    def _leave(self, position: Position) -> None:
        """Go on to the epoch after `position` without reading the rest of its epoch."""
        generator = self.synchronized_generator
        if generator is not None and position.generator_state is not None:
            generator.set_state(position.generator_state)
        if position.consumed:
            self._shard.pass_over()
        self._cursor.epoch = position.epoch + 1

    def _units_to_skip(self) -> int:
        units = self.skip_batches * self._shard.units_per_step
        length = self._shard.num_units
        return units if length is None else min(units, length)

    def _is_at_end(self, position: Position) -> bool:
        return self._is_end(position.consumed)

    def _is_end(self, units: int) -> bool:
        length = self._shard.num_units
        return length is not None and units >= length

    # ---- position

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: plain integers and strings, and the generator's state as a uint8 tensor.

        It counts what was received from the iterator, not what workers fetched ahead, and means the same on any number
        of ranks and workers. After `break` it is the place of the break; after the last batch but before the loop has
        ended, it is the end of that epoch, of which nothing is left.
        """
        position = self._position()
        if self._order_kind != "generator":
            position = replace(position, generator_state=None)
        return state_of(position, self._fingerprint(), self._seed)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration continue at a saved position; the one after it is a whole epoch, the next in order.

        Raises:
            DataStateError: the state is of a newer version, of another data set's length, of another kind of order,
                or counts batches of another size.
        """
        position = position_of(state_dict, self._fingerprint())
        sampler = innermost_sampler(self._shard)
        if isinstance(sampler, SeedableRandomSampler):
            sampler.initial_seed = int(state_dict["seed"])
        cursor = self._cursor
        cursor.resume, cursor.current, cursor.epoch = position, None, position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of `epoch`, and tell the data set, samplers and what they wrap.

        A loaded position of that epoch is kept; one of another epoch counts as left.
        """
        cursor = self._cursor
        if cursor.resume is not None and cursor.resume.epoch != epoch:
            self._leave(cursor.resume)
            cursor.resume = None
        if cursor.current is not None and cursor.current.origin.epoch != epoch:
            cursor.current = None
        cursor.epoch = epoch
        self._tell_epoch(epoch)

    def skipping(self, num_batches: int) -> DataLoaderShard:
        """A loader over the same order and progress, whose iterations leave out the first `num_batches` of an epoch.

        They count from the start of the epoch, and use up a loaded position.
        """
        if num_batches < 0:
            raise DataLoaderError(f"Cannot skip {num_batches} batches; it has to be at least 0.")
        twin = copy.copy(self)
        twin.skip_batches = self.skip_batches + num_batches
        twin._skips_by_hand = True  # noqa: SLF001  (its own class)
        return twin

    def _position(self) -> Position:
        cursor = self._cursor
        if cursor.resume is not None:
            return cursor.resume
        if cursor.current is not None:
            return cursor.current.position
        generator = self.synchronized_generator
        return Position(epoch=cursor.epoch, generator_state=None if generator is None else generator.get_state())

    @property
    def _order_kind(self) -> OrderKind:
        if isinstance(innermost_sampler(self._shard), SeedableRandomSampler):
            return "seedable"
        return "fixed" if self.synchronized_generator is None else "generator"

    @property
    def _seed(self) -> int | None:
        sampler = innermost_sampler(self._shard)
        return sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None

    def _fingerprint(self) -> Fingerprint:
        shard = self._shard
        return Fingerprint(
            order=self._order_kind,
            unit="samples" if shard.counts_samples else "batches",
            length=shard.num_units,
            batch_size=shard.batch_size,
            num_processes=shard.num_processes,
            world_bound=isinstance(shard, StreamPart) and not shard.counts_samples,
        )

    def _tell_epoch(self, epoch: int) -> None:
        tell_epoch((self.dataset, self._shard), epoch)
        sampler = innermost_sampler(self._shard)
        if isinstance(sampler, SeedableRandomSampler):
            sampler.reseed()

    # ---- facts

    @property
    def iteration(self) -> int:
        """The epoch that is being read, or comes next."""
        return self._cursor.epoch

    @property
    def base_dataloader(self) -> DataLoader:
        """The loader that this one was made from."""
        return self if self._base is None else self._base

    @property
    def tail(self) -> Tail | None:
        """Size and real samples of this rank's last batch, once it has been handed out."""
        return self._tail

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all ranks together take in one step; None for a batch sampler that does not tell."""
        size = self._shard.total_batch_size
        sampler = innermost_sampler(self._shard)
        return size * sampler.num_replicas if size and isinstance(sampler, DistributedSampler) else size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the data set, over all ranks."""
        return int(getattr(self.dataset, "total_length", None) or len(self.dataset))  # type: ignore[arg-type]

    def __len__(self) -> int:
        """This rank's batches in a whole epoch, less those skipped at its start."""
        return max(len(self._shard) - self.skip_batches, 0)

    def __copy__(self) -> DataLoaderShard:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), _iterator=None)  # persistent workers belong to one loader
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_iterator": None}


def _own_part(loader: DataLoader) -> BatchSamplerShard | StreamPart:
    """This rank's part of a loader just constructed; torch's attributes are made to say what the user wrote.

    torch forbids to set them after construction, since it would not notice; here that is the point.
    """
    attributes = vars(loader)
    if isinstance(loader.dataset, IterableDataset):
        stream = StreamPart(loader)
        attributes["dataset"] = stream.dataset
        return stream
    if loader.batch_sampler is None:
        order = loader.sampler
        items = order if isinstance(order, BatchSamplerShard) else ItemShard(order)
        attributes["sampler"] = items
        return items
    given = loader.batch_sampler
    part = given if isinstance(given, BatchSamplerShard) else BatchSamplerShard(given)
    attributes.update(
        batch_sampler=part, batch_size=part.batch_size, drop_last=part.drop_last, sampler=innermost_sampler(part)
    )
    return part
