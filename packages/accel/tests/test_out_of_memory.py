"""Memory given back, and batch sizes that shrink until they fit."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from accel import Accelerator, find_executable_batch_size, release_memory
from accel.utils import clear_device_cache, should_reduce_batch_size
from accel_state.errors import BatchSizeError, RankFailedError


def test_sizes_halve_until_one_fits_and_the_next_call_begins_there():
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size, *, limit):
        tried.append(batch_size)
        if batch_size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return batch_size

    assert train(limit=30) == 25
    assert train(limit=30) == 25
    assert tried == [100, 50, 25, 25]


def test_without_arguments_the_decorator_begins_at_128():
    @find_executable_batch_size
    def train(batch_size):
        return batch_size

    assert train() == 128
    assert train.__name__ == "train"


def test_sizes_can_be_given_by_the_caller():
    sizes = iter([20, 7])

    @find_executable_batch_size(starting_batch_size=33, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size):
        if batch_size > 10:
            raise MemoryError
        return batch_size

    assert train() == 7


def test_a_size_that_does_not_shrink_is_an_error():
    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: 8)
    def train(batch_size):
        raise MemoryError

    with pytest.raises(ValueError, match="gave 8 after 8"):
        train()


def test_the_floor_is_named_with_all_that_was_tried():
    @find_executable_batch_size(starting_batch_size=12, smallest_batch_size=3)
    def train(batch_size):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    with pytest.raises(BatchSizeError, match=r"No executable batch size found, reached zero.*with 12, 6, 3 .*9 bytes"):
        train()
    with pytest.raises(BatchSizeError, match="ran out of memory with 3"):
        train()


@pytest.mark.parametrize(("first", "smallest"), [(0, 0), (4, 8), (8, 0)])
def test_sizes_that_make_no_sense_are_refused(first, smallest):
    with pytest.raises(ValueError, match=f"starting_batch_size={first}, smallest_batch_size={smallest}"):
        find_executable_batch_size(starting_batch_size=first, smallest_batch_size=smallest)


def test_other_errors_come_through_at_once():
    tried = []

    @find_executable_batch_size
    def train(batch_size):
        tried.append(batch_size)
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        train()
    assert tried == [128]


def test_a_batch_size_passed_by_the_caller_is_refused():
    @find_executable_batch_size
    def train(batch_size, data):
        raise AssertionError

    with pytest.raises(TypeError, match=r"call `train\(data=2\)`"):
        train(1, 2)

    @find_executable_batch_size
    def takes_none():
        raise AssertionError

    with pytest.raises(TypeError, match=r"define `takes_none\(batch_size, ...\)`"):
        takes_none()


def test_what_a_failed_call_held_is_gone_before_the_next():
    held: list[weakref.ref] = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        model = nn.Linear(4, 4)
        assert all(reference() is None for reference in held)
        held.append(weakref.ref(model))
        if batch_size > 1:
            raise torch.OutOfMemoryError("out of memory")

    train()
    assert len(held) == 2


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (torch.OutOfMemoryError("anything"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("XPU out of memory."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_memory_are_known_by_type_or_words(error, ran_out):
    assert should_reduce_batch_size(error) is ran_out


def test_released_objects_are_gone():
    model = nn.Linear(2, 2)
    model.itself = [model]
    watched = weakref.ref(model)
    other = object()
    model, other = release_memory(model, other)
    assert model is None
    assert other is None
    clear_device_cache(garbage_collection=True)
    assert watched() is None


def test_what_an_accelerator_let_go_is_gone_without_the_collector(monkeypatch):
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    watched = [weakref.ref(each) for each in (model, optimizer, loader)]
    monkeypatch.setattr(gc, "collect", lambda: 0)  # not by hand either
    gc.disable()
    try:
        model, optimizer, scheduler, loader = accelerator.free_memory(model, optimizer, scheduler, loader)
        del batch
        alive = [type(reference()).__name__ for reference in watched if reference() is not None]
    finally:
        gc.enable()
    assert alive == []


def _searches(fails: str):
    from accel import Accelerator

    rank = Accelerator(cpu=True).process_index
    tried = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size):
        tried.append(batch_size)
        if rank == 1 and batch_size > 2:
            raise torch.OutOfMemoryError("out") if fails == "memory" else KeyError("lost")
        return batch_size

    try:
        return train(), tried
    except (KeyError, RankFailedError) as error:
        return f"{type(error).__name__}: {error}"


def test_ranks_agree_on_the_size(ranks):
    assert ranks(_searches, 2, "memory") == [(2, [8, 4, 2])] * 2


def test_a_failure_of_another_kind_ends_all_ranks(ranks):
    other, own = ranks(_searches, 2, "key")
    assert own == "KeyError: 'lost'"
    assert other.startswith("RankFailedError:")
    assert "on rank 1: KeyError: 'lost'" in other
