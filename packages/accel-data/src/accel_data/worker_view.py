"""What the user's code sees in a worker: `get_worker_info().dataset` is the user's data set, as under torch alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.utils.data import get_worker_info

from .seeded import SeededReads
from .sources import ShardedStream
from .stream import IterableDatasetShard


@dataclass(frozen=True)
class InitWithOwnDataset:
    """Runs first in each worker: puts the user's data set where ours is, then calls the user's function, if any."""

    init: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None  # torch calls this in workers only
        dataset = info.dataset
        while isinstance(dataset, SeededReads | ShardedStream | IterableDatasetShard):
            dataset = dataset.dataset
        object.__setattr__(info, "dataset", dataset)  # it is frozen, so that users do not expect torch to read it
        if self.init is not None:
            self.init(worker)
