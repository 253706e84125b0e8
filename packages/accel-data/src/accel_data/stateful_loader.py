"""torchdata's `StatefulDataLoader`: recognised by where its parts are defined, never imported.

What it is for, an exact position, every prepared loader has anyway. It brings samplers of its own, which draw what
torch's draw; they are replaced by torch's, whose orders are cut by arithmetic.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from accel_state.errors import DataLoaderError

_MODULE = "torchdata.stateful_dataloader"


def iterates_as_torchdata(loader: DataLoader) -> bool:
    """Whether the loader is a `StatefulDataLoader`, or a subclass that iterates as it does.

    Raises:
        DataLoaderError: a state was loaded into it, which would be lost.
    """
    if not getattr(type(loader).__iter__, "__module__", "").startswith(_MODULE):
        return False
    if getattr(loader, "next_iter_state", None) is not None:
        raise DataLoaderError(
            "A state was loaded into this StatefulDataLoader before it was prepared. It counts the batches of one "
            "process and would be lost: prepare the loader first, then load a state that a prepared loader saved."
        )
    return True


def with_torch_samplers(order: Any) -> Any:
    """A sampler or batch sampler with torch's own in place of torchdata's; the generator stays."""
    if type(order).__module__ != f"{_MODULE}.sampler":
        return order
    if isinstance(order, BatchSampler):
        return BatchSampler(with_torch_samplers(order.sampler), order.batch_size, order.drop_last)
    num_samples = order._num_samples  # noqa: SLF001  (None follows the data set's length)
    return RandomSampler(order.data_source, order.replacement, num_samples, order.generator)
