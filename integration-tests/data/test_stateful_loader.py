"""torchdata's `StatefulDataLoader`, given to `prepare_data_loader`."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from accel_data import DataLoaderShard, prepare_data_loader
from accel_state.errors import DataLoaderError

# torchdata 0.11 calls what torch 2.13 deprecates, whenever one of its loaders is made
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

LENGTH, BATCH_SIZE = 53, 4


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(LENGTH))


def as_tens(samples: list[int]) -> list[int]:
    return [10 * sample for sample in samples]


def settings(**changed: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {"batch_size": BATCH_SIZE, "shuffle": True, "generator": generator, "collate_fn": as_tens} | changed


def prepared(world: int = 1, rank: int = 0, **changed: Any) -> DataLoaderShard:
    loader = StatefulDataLoader(range(LENGTH), **settings(**changed))
    return prepare_data_loader(loader, num_processes=world, process_index=rank, even_batches=False)


def read(loader: DataLoaderShard, num_batches: int | None = None) -> list[int]:
    samples: list[int] = []
    for step, batch in enumerate(loader, start=1):
        samples += batch
        if step == num_batches:
            break
    return samples


def test_it_is_read_as_a_loader_of_torch_with_the_same_settings() -> None:
    worker = {"num_workers": 1, "prefetch_factor": 3, "multiprocessing_context": "fork", "timeout": 40}
    ours = prepared(drop_last=True, **worker)
    torchs = prepare_data_loader(
        DataLoader(range(LENGTH), **settings(drop_last=True)), num_processes=1, process_index=0
    )
    assert (ours.num_workers, ours.prefetch_factor, ours.timeout) == (1, 3, 40)
    assert ours.multiprocessing_context.get_start_method() == "fork"
    assert ours.collate_fn is as_tens
    for _ in range(2):
        batches = list(ours)
        assert len(batches) == LENGTH // BATCH_SIZE
        assert batches == list(torchs)


def test_orders_of_its_own_samplers_are_cut_by_arithmetic() -> None:
    assert prepared().part.counts_samples
    for changed in ({"batch_size": None, "collate_fn": None}, {}):
        assert type(prepared(**changed).get_sampler()) is RandomSampler
    drawn = {"shuffle": None, "sampler": RandomSampler(range(LENGTH), replacement=True, num_samples=9)}
    assert len(read(prepared(**drawn))) == 9


def test_its_position_is_exact_on_another_number_of_ranks_and_workers() -> None:
    ranks = [prepared(2, rank, num_workers=2) for rank in range(2)]
    before = [read(loader, 3) for loader in ranks]
    state = ranks[0].state_dict()
    assert state["samples_consumed"] == 2 * 3 * BATCH_SIZE
    after = []
    for rank in range(3):
        loader = prepared(3, rank, generator=torch.Generator().manual_seed(99))
        loader.load_state_dict(state)
        after.append(read(loader))
    assert sorted(chain(*before, *after)) == [10 * sample for sample in range(LENGTH)]


def test_a_stream_resumes_where_it_stood() -> None:
    def stream() -> DataLoaderShard:
        loader = StatefulDataLoader(Stream(), batch_size=BATCH_SIZE, collate_fn=as_tens)
        return prepare_data_loader(loader, num_processes=1, process_index=0)

    loader = stream()
    before = read(loader, 5)
    resumed = stream()
    resumed.load_state_dict(loader.state_dict())
    assert before + read(resumed) == [10 * sample for sample in range(LENGTH)]


def test_a_state_that_would_be_lost_is_refused() -> None:
    loader = StatefulDataLoader(range(LENGTH), **settings())
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(DataLoaderError, match="prepare the loader first"):
        prepare_data_loader(loader, num_processes=1, process_index=0)
