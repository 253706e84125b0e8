"""How loaders are prepared."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.errors import DataLoaderError


@dataclass
class DataLoaderConfiguration:
    """How `prepare` treats data loaders. Mutable and in the peer's field order, since its users rely on both.

    Args:
        split_batches: each batch is split over the ranks, instead of every rank reading a batch of its own.
        dispatch_batches: rank 0 reads and sends to the others; None lets the kind of data set decide.
        even_batches: complete the last round from the start of the data, so that all ranks get as many batches.
        use_seedable_sampler: shuffle by (seed, epoch) instead of by a generator that lives through the run.
        data_seed: the seed of that sampler; by default the one torch was seeded with.
        non_blocking: copy batches to the device without waiting; effective from pinned memory.
        use_stateful_dataloader: loaders keep their exact position; ours always do.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        optional = {"dispatch_batches": (bool, type(None)), "data_seed": (int, type(None))}
        for name, value in vars(self).items():
            if not isinstance(value, optional.get(name, bool)) or (name == "data_seed" and isinstance(value, bool)):
                allowed = {"dispatch_batches": "True, False or None", "data_seed": "an integer or None"}
                wanted = allowed.get(name, "True or False")
                raise DataLoaderError(f"DataLoaderConfiguration({name}={value!r}) is not allowed: give {wanted}")
        if self.data_seed is not None and not self.use_seedable_sampler:
            raise DataLoaderError(
                f"DataLoaderConfiguration(data_seed={self.data_seed}) has no effect without use_seedable_sampler=True, "
                "whose seed it is: set both or none"
            )
