"""Copies to a GPU: from pinned memory, ahead on a stream of their own, without the loop waiting for them."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_data import DevicePrefetcher, prepare_data_loader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SAMPLES = 4096


@contextmanager
def no_synchronisation():
    """Inside, whatever makes the CPU wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def source(workers=0):
    numbers = torch.arange(SAMPLES, dtype=torch.float32)
    rows = numbers.unsqueeze(1).expand(SAMPLES, 1024).contiguous()
    return DataLoader(TensorDataset(rows, numbers), batch_size=256, num_workers=workers, pin_memory=True)


def heavy(rows):
    """Work that is still going on when the next copies are issued."""
    square = rows.T @ rows
    for _ in range(8):
        square = square @ square / square.abs().amax()
    return square.sum() * 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_batches_arrive_whole(workers, non_blocking):
    loader = prepare_data_loader(
        source(workers),
        device="cuda",
        num_processes=1,
        process_index=0,
        put_on_device=True,
        non_blocking=non_blocking,
    )
    sums = []
    for rows, numbers in loader:
        assert rows.device.type == numbers.device.type == "cuda"
        sums.append(rows.sum(1) / 1024 - numbers + heavy(rows))
    assert torch.cat(sums).abs().max().item() == 0


def test_pinned_copies_make_nobody_wait():
    batches = list(source())
    assert all(rows.is_pinned() for rows, _ in batches)
    for rows, _ in DevicePrefetcher(batches, "cuda"):  # warms up streams and the allocator
        heavy(rows)
    torch.cuda.synchronize()
    sums = []
    with no_synchronisation():
        for rows, numbers in DevicePrefetcher(batches, "cuda"):
            sums.append(rows.sum(1) / 1024 - numbers + heavy(rows))
    assert torch.cat(sums).abs().max().item() == 0


def test_copies_run_on_a_stream_of_their_own():
    batches = list(source())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for rows, _ in DevicePrefetcher(batches, "cuda"):
            heavy(rows)
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = {event.device_resource_id for event in events if "HtoD" in event.name}
    kernels = {event.device_resource_id for event in events if "gemm" in event.name.lower()}
    assert copies
    assert kernels
    assert copies.isdisjoint(kernels)


def test_memory_of_a_batch_is_not_handed_out_while_it_is_used():
    """Each batch is dropped at once while work on it is still queued; the next copy must not land in its memory."""
    wrong = torch.zeros((), device="cuda")
    for rows, numbers in DevicePrefetcher(list(source()), "cuda"):
        delay = heavy(rows)
        wrong += (rows.sum(1) / 1024 - numbers + delay).abs().max()
        del rows, numbers
    assert wrong.item() == 0
