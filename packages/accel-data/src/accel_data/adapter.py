"""`DataLoaderAdapter`: a torch DataLoader that knows exactly where it stands, and continues there."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel_state.errors import DataLoaderError, DataStateError

from .digest import SampleDigest, digest_of
from .epochs import tell_epoch, warn_of_deaf_workers
from .feeds import Feed, KnownFeed, Ragged, Tail, name_samples
from .mailbox import DataLoaderStateMixin
from .parts import Part, own_part
from .permutation import PermutationSampler
from .position import Cursor, Fingerprint, OrderKind, Pass, Position, check_form, position_of, state_of
from .randomness import drawn_generator, shared_seed, synchronize, worker_seed
from .samplers import SeedableRandomSampler, innermost_sampler, set_innermost_sampler
from .seeded import SeededIndices, SeededReads, epoch_seed
from .shard import BatchSamplerShard
from .source_part import SourceFeed, SourcePart
from .stream import StreamPart
from .worker_view import InitWithOwnDataset

logger = logging.getLogger("accel_data")

_SEEDED = (SeedableRandomSampler, PermutationSampler)


class DataLoaderAdapter(DataLoaderStateMixin, DataLoader):
    """A torch DataLoader that knows its last batch when it hands it out, and whose position can be saved and loaded.

    The base of every loader here. Of several iterators open at once, the one opened last is the one whose position
    counts.

    Args:
        dataset: map-style or iterable.
        use_stateful_dataloader: adds nothing: every loader here keeps its exact position.
        batch_sampler: as torch's. One that is no `BatchSamplerShard` is taken as this rank's part already.
        **kwargs: those of `torch.utils.data.DataLoader`.

    Raises:
        DataLoaderError: `in_order=False`.
    """

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(dataset, batch_sampler=batch_sampler, **kwargs)
        if not self.in_order:
            raise DataLoaderError(
                "in_order=False delivers batches in an order that nobody knows beforehand, so neither the position nor "
                "the last batch could be told. Use in_order=True."
            )
        self.use_stateful_dataloader = use_stateful_dataloader
        self.skip_batches = 0
        self.resumes_mid_epoch = True  # False for scripts that count and leave out the batches before the place saved
        self.seed_per_sample = False
        self._epoch_seed: int | None = None
        self.ranks_met = False  # set by whoever ran a backward that waits for all ranks in this pass
        # asked where a rank has nothing at all, so that no backward can have told: whether the pass is for training
        self.ranks_will_meet: Callable[[], bool] | None = None
        self.joins_uneven_inputs = False  # whether ranks without data shadow the others, so that none waits forever
        self.rng_types: list[Any] = ["generator"]
        self._shard = own_part(self)
        self._cursor = Cursor()
        self._skips_by_hand = False
        self._tail: Tail | None = None
        self.longest_gathered = 0  # by `gather_for_metrics` in this pass: values of one rank for one batch
        own = getattr(innermost_sampler(self._shard), "generator", None)
        self._own_generators(own)

    def _own_generators(self, order: torch.Generator | None) -> None:
        """Tell the generator that decides the order from the one that seeds workers."""
        self.synchronized_generator = order
        self._worker_source: torch.Generator | None = order or self.generator
        self.generator = torch.Generator()  # seeds workers; set anew at the start of each pass

    # ---- iterating

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """This rank's batches: the rest of the saved epoch if a state was loaded, else a whole epoch.

        Cost: one broadcast of the generator's state (5 KB) where the order is random and there are several ranks.
        """
        current = self._start()
        feed = current.feed
        batches = self._batches(feed)
        self._tail, self.ranks_met, self.longest_gathered = None, False, 0
        self.begin()
        self.remainder = feed.remainder
        is_left = False
        try:
            for batch in batches:
                if feed.ragged is not None:
                    self._check_end(feed.ragged, current.served)
                current.served += 1
                if current.served == feed.total:
                    self.end_of_dataloader, self.remainder, self._tail = True, feed.remainder, feed.tail
                elif feed.is_padding:
                    self._tail = feed.tail
                elif self._tail is not None:  # set as seldom as can be: torch's loaders look at every attribute set
                    self._tail = None
                yield batch
            if feed.ragged is not None:
                self._check_end(feed.ragged, current.served)
            self._finish(current)
        except DataLoaderError:
            raise
        except GeneratorExit:
            is_left = True
            raise
        except Exception as error:
            name_samples(error, feed, current.served)
            raise
        finally:
            if self._cursor.current is not current:
                self._count(current)
            self.end()
            if is_left and self.gradient_state is not None:
                self.gradient_state._leave_dataloader(self)  # noqa: SLF001

    def _check_end(self, ragged: Ragged, served: int) -> None:
        """Fail, on every rank at the same step, where some would go on to wait for others that have no more batches."""
        if served != ragged.common or self.joins_uneven_inputs:
            return
        if self.ranks_met or (served == 0 and self.ranks_will_meet is not None and self.ranks_will_meet()):
            raise DataLoaderError(
                f"After {served} batches the ranks from {ragged.first_dry} on have none left, while lower ones do, and "
                "backward waits for all ranks (DistributedDataParallel): it would wait forever. Use "
                "even_batches=True, drop_last=True in the loader, or a `join_uneven_inputs` block; evaluate under "
                "model.eval() or torch.no_grad()."
            )

    def _open(self, origin: Position) -> Feed:
        """What is read in a new pass."""
        if isinstance(self._shard, SourcePart):
            return self._shard.open(origin.consumed, origin.shards)
        if isinstance(self._shard, StreamPart):
            return self._shard.open(origin.consumed, origin.source_state)
        return self._shard.open(origin.consumed)

    def _batches(self, feed: Feed) -> Iterator[Any]:
        """What the user gets in a pass, where it belongs."""
        if isinstance(feed, SourceFeed):
            loader = weakref.proxy(self)  # which holds the feed
            feed.read_again = lambda: loader._torch_iterator(feed)  # noqa: SLF001  (its own class)
        return self._placed(feed.serve(self._torch_iterator(feed)))

    def _placed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches where they belong."""
        return batches

    def _torch_iterator(self, feed: Feed) -> Iterator[Any]:
        """Torch's own iterator, reading indices from `feed`."""
        attributes, dataset, init, collate = vars(self), self.dataset, self.worker_init_fn, self.collate_fn
        self._shard.armed = feed
        if self._epoch_seed is not None:
            self._shard.armed = SeededIndices(feed, self._epoch_seed)
            attributes["dataset"] = SeededReads(dataset)
        attributes["worker_init_fn"] = InitWithOwnDataset(init)
        if isinstance(self._shard, StreamPart | SourcePart):
            attributes["collate_fn"] = self._shard.collating(collate)
        try:
            return super().__iter__()
        finally:
            self._shard.armed = None
            attributes.update(dataset=dataset, worker_init_fn=init, collate_fn=collate)

    def _start(self) -> Pass:
        """Open a pass at the saved position or at the next epoch's start."""
        position = self._arrive()
        self._synchronize()
        return self._opened(position)

    def _arrive(self) -> Position:
        """Where the next pass begins, with all that it is read from told so; nothing that other ranks take part in."""
        cursor = self._cursor
        self._count(cursor.current)
        if isinstance(self._shard, StreamPart):
            self._shard.rewind()
        told = cursor.epoch if cursor.resume is None else cursor.resume.epoch
        self._tell_epoch(told)  # first, since a batch sampler may have another length in each epoch
        position = self._starting_point()
        cursor.epoch = position.epoch
        if position.epoch != told:
            self._tell_epoch(position.epoch)
        return position

    def _synchronize(self) -> None:
        """Let all ranks that read have rank 0's generators, and its seed of samples where no generator decides."""
        cursor, generator = self._cursor, self.synchronized_generator
        if self._num_readers > 1:
            synchronize(self.rng_types, generator)
        if self._draws_sample_seed and cursor.sample_seed is None:
            cursor.sample_seed = shared_seed(self._num_readers > 1)

    @property
    def _draws_sample_seed(self) -> bool:
        """Whether samples are seeded, though nothing random decides the order."""
        return self.seed_per_sample and self.synchronized_generator is None and self._seed is None

    def _opened(self, position: Position) -> Pass:
        """A pass from `position` on, with its feed and the generators where they have to be."""
        cursor, generator = self._cursor, self.synchronized_generator
        state = None if generator is None else generator.get_state()
        source = self._worker_source
        basis = state if source is None or source is generator else source.get_state()
        seed = worker_seed(basis, position.epoch, position.consumed, self._shard.process_index)
        self.generator.manual_seed(seed)
        if self.seed_per_sample:
            basis_of_samples = cursor.sample_seed if self._draws_sample_seed else self._seed
            self._epoch_seed = epoch_seed(state, basis_of_samples, position.epoch)
        cursor.current = Pass(
            origin=replace(position, generator_state=state),
            units_per_step=self._units_per_step,
            num_units=self._shard.num_units,
        )
        cursor.current.feed = self._open(cursor.current.origin)
        return cursor.current

    @property
    def _num_readers(self) -> int:
        """Ranks that have to agree on the order."""
        return self._shard.num_processes

    @property
    def _num_parts(self) -> int:
        """Parts that the data is cut into."""
        return self._shard.num_processes

    @property
    def _units_per_step(self) -> int:
        """Units of the order that all ranks together consume in one step."""
        return self._shard.units_per_step

    def _starting_point(self) -> Position:
        """Where the next pass begins; uses up a loaded position."""
        cursor = self._cursor
        resume, cursor.resume = cursor.resume, None
        skipped = self._units_to_skip()
        if resume is not None and self._skips_by_hand and self._is_end(resume.consumed) and not self._is_end(skipped):
            self._leave(resume)  # nothing is left of that epoch, so the batches to skip are the next one's
            resume = None
        if resume is not None and not self.resumes_mid_epoch:
            resume = replace(resume, consumed=0, shards=None, source_state=None)
        if resume is None:
            return Position(epoch=cursor.epoch, consumed=skipped)
        if self.synchronized_generator is not None and resume.generator_state is not None:
            self.synchronized_generator.set_state(resume.generator_state)
        if self._skips_by_hand:
            return replace(resume, consumed=skipped, shards=None, source_state=None)
        if resume.consumed:
            unit = "samples" if self._shard.counts_samples else "batches"
            length = self._shard.num_units
            logger.info("epoch %d continues after %d of %s %s", resume.epoch, resume.consumed, length or "?", unit)
        return resume

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
        units = self.skip_batches * self._units_per_step
        length = self._shard.num_units
        return units if length is None else min(units, length)

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
        sample_seed = self._cursor.sample_seed if self._draws_sample_seed else None
        return state_of(position, self._fingerprint(), self._seed, sample_seed)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration continue at a saved position; the one after it is a whole epoch, the next in order.

        Raises:
            DataStateError: the state is malformed, of a newer version, of another data set's length, of another kind of
                order, counts batches of another size, or of streams of another number of workers.
        """
        check_form(state_dict)
        cursor = self._cursor
        tells = state_dict.get("length") != self._shard.num_units  # which may depend on the epoch
        if tells:
            self._tell_epoch(state_dict["epoch"])
        try:
            position = position_of(state_dict, self._fingerprint())
        except DataStateError:
            if tells:
                self._tell_epoch(cursor.epoch)
            raise
        sampler = innermost_sampler(self._shard)
        if isinstance(sampler, _SEEDED):
            sampler.initial_seed = state_dict["seed"]
        cursor.sample_seed = state_dict.get("sample_seed", cursor.sample_seed)
        self._count(cursor.current)
        cursor.resume, cursor.current, cursor.epoch = position, None, position.epoch

    def adjust_state_dict_for_prefetch(self) -> None:
        """Nothing to adjust: a position counts what was received, never what was fetched ahead."""

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
        sampler = innermost_sampler(self._shard)
        if isinstance(sampler, _SEEDED):
            return "seedable" if isinstance(sampler, SeedableRandomSampler) else "permutation"
        return "fixed" if self.synchronized_generator is None else "generator"

    @property
    def _seed(self) -> int | None:
        sampler = innermost_sampler(self._shard)
        return sampler.initial_seed if isinstance(sampler, _SEEDED) else None

    def _fingerprint(self) -> Fingerprint:
        shard = self._shard
        return Fingerprint(
            order=self._order_kind,
            unit="steps" if isinstance(shard, SourcePart) else "samples" if shard.counts_samples else "batches",
            length=shard.num_units,
            batch_size=shard.batch_size,
            num_processes=self._num_parts,
            world_bound=isinstance(shard, StreamPart)
            and not shard.counts_samples
            and shard.num_processes == self._num_parts,
            num_workers=shard.num_workers if isinstance(shard, StreamPart) and shard.has_workers else None,
            num_shards=shard.num_shards if isinstance(shard, SourcePart) else None,
            rank_alone=None if not isinstance(shard, SourcePart) or shard.knows_all else shard.process_index,
        )

    def _tell_epoch(self, epoch: int) -> None:
        if self._iterator is not None and not isinstance(self._shard, SourcePart):
            warn_of_deaf_workers(self.dataset)
        tell_epoch((self.dataset, self._shard), epoch)
        sampler = innermost_sampler(self._shard)
        if isinstance(sampler, SeedableRandomSampler):
            sampler.reseed()

    def fingerprint(self) -> SampleDigest:
        """A digest of the samples that this rank has received from this loader: which, and at which places.

        Digests of all ranks, and of the runs before and after a resume, add up to that of the run that was never
        interrupted: `sum(digests, SampleDigest())`. Nothing is computed per batch; a call costs about 20 ns per sample
        of the current pass, the end of a pass as much.

        Raises:
            DataLoaderError: the order is only known by reading it (a foreign sampler, an iterable data set).
        """
        current = self._cursor.current
        if current is None or current.is_counted:
            return self._cursor.digest
        return self._cursor.digest + self._digest_of(current)

    def _digest_of(self, current: Pass) -> SampleDigest:
        if not isinstance(current.feed, KnownFeed):
            raise DataLoaderError(
                "A fingerprint needs an order that is known without reading it: one of torch's samplers, or a "
                "PermutationSampler, over a map-style data set."
            )
        return digest_of(current.origin.epoch, *current.feed.samples(0, current.served))

    def _count(self, current: Pass | None) -> None:
        """Count the samples of a pass that is over or was left, once."""
        if current is not None and not current.is_counted and isinstance(current.feed, KnownFeed):
            self._cursor.digest += self._digest_of(current)
            current.is_counted = True

    # ---- the sampler

    def get_sampler(self) -> Any:
        """The sampler that decides the order: the innermost one."""
        return innermost_sampler(self._shard)

    def set_sampler(self, sampler: Any) -> None:
        """Let another sampler decide the order from the next iteration on; a random one gets a generator of its own.

        Raises:
            DataLoaderError: the data set is iterable: it decides its order itself.
        """
        if not isinstance(self._shard, BatchSamplerShard):
            raise DataLoaderError("An iterable data set decides its order itself, so no sampler can be set.")
        if getattr(sampler, "generator", False) is None:
            sampler.generator = drawn_generator()
        set_innermost_sampler(self._shard, sampler)
        vars(self)["sampler"] = sampler if self.batch_sampler is not None else self._shard
        self.synchronized_generator = self._worker_source = getattr(sampler, "generator", None)

    # ---- facts

    @property
    def iteration(self) -> int:
        """The epoch that is being read, or comes next."""
        return self._cursor.epoch

    @property
    def part(self) -> Part:
        """What is read of the order or the stream."""
        return self._shard

    @property
    def tail(self) -> Tail | None:
        """Size and real samples of this rank's last batch, once it has been handed out."""
        return self._tail

    def __len__(self) -> int:
        """This rank's batches in a whole epoch, less those skipped at its start."""
        return max(len(self._shard) - self.skip_batches, 0)

    def __copy__(self) -> DataLoaderAdapter:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), _iterator=None)  # persistent workers belong to one loader
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_iterator": None, "ranks_will_meet": None}  # which belongs to the run
