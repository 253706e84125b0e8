"""On one NVIDIA GPU, in a group of one rank over nccl and gloo; minutes at most: `tools/dev test accel-state --gpu`.

Alone a rank has nobody to talk to, so that collectives return what they are given: here they are made to use the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]

Ranks = Callable[..., list[Any]]
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::item", "_local_scalar_dense")


def in_a_group_of_one() -> torch.device:
    """Make the group, have collectives use it, and warm it up; returns the device."""
    from accel_state import PartialState, gather, reduce
    from accel_state.collectives import operations, reduction
    from accel_state.process_group import current_job

    state = PartialState()
    channel = current_job().channel
    operations.current_channel = reduction.current_channel = lambda: channel
    for _ in range(2):  # nccl connects, and waits, when it is first used
        gather(torch.ones(1, device=state.device))
        reduce(torch.ones(1, device=state.device))
    return state.device


def test_the_group_has_a_half_for_the_device_and_one_for_the_cpu(ranks: Ranks) -> None:
    def body() -> Any:
        import torch.distributed as dist

        from accel_state import PartialState

        state = PartialState()
        totals = [torch.ones(2, device=device) for device in (state.device, "cpu")]
        for total in totals:
            dist.all_reduce(total)
        return state.backend, str(state.device), [total.tolist() for total in totals]

    assert ranks(body, 1) == [("nccl", "cuda:0", [[1, 1], [1, 1]])]


def test_collectives_of_device_tensors_give_the_values(ranks: Ranks) -> None:
    def body() -> Any:
        from accel_state import broadcast, gather, pad_across_processes, reduce

        device = in_a_group_of_one()
        tree = {
            "float": torch.arange(6.0, device=device).view(3, 2),
            "bf16": torch.arange(3, device=device, dtype=torch.bfloat16),
            "fp8": torch.ones(5, device=device).to(torch.float8_e4m3fn),
            "bool": torch.tensor(True, device=device),
            "empty": torch.empty(0, 4, device=device),
            "cpu": torch.arange(2),
            "large": torch.ones(1 << 20, device=device),
        }
        for got in (gather(tree), gather(tree, uniform=True), broadcast(tree), pad_across_processes(tree)):
            for key, value in tree.items():
                assert got[key].device == value.device and got[key].dtype == value.dtype, key
                assert got[key].float().flatten().tolist() == value.float().flatten().tolist(), key
        half = torch.full((3,), 60000.0, device=device, dtype=torch.float16)
        return reduce({"h": half, "i": torch.ones(1, device=device, dtype=torch.int64)}, "mean")["h"].tolist()

    assert ranks(body, 1) == [[60000.0] * 3]


@pytest.mark.parametrize("name", ["gather", "gather of a tree", "uniform", "reduce", "broadcast", "pad"])
def test_no_collective_waits_for_the_device(ranks: Ranks, name: str) -> None:
    def body() -> Any:
        from torch.profiler import ProfilerActivity, profile

        from accel_state import broadcast, gather, pad_across_processes, reduce

        device = in_a_group_of_one()
        one = torch.ones(1000, 10, device=device)
        tree = {"x": one, "y": [torch.ones(3, device=device, dtype=torch.bfloat16), torch.ones(2)]}
        call = {
            "gather": lambda: gather(one),
            "gather of a tree": lambda: gather(tree),
            "uniform": lambda: gather(one, uniform=True),
            "reduce": lambda: reduce(tree),
            "broadcast": lambda: broadcast(tree),
            "pad": lambda: pad_across_processes(one),
        }[name]
        call()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return [event.key for event in profiler.key_averages()]

    (events,) = ranks(body, 1)
    # the profiler itself waits for the device once, when it stops
    waits = [event for event in events if any(wait in event for wait in WAITS) and event != "cudaDeviceSynchronize"]
    assert events and not waits, waits


def test_seeds_and_random_state_of_the_device(ranks: Ranks) -> None:
    def body() -> Any:
        from accel_state import capture_rng_state, restore_rng_state, set_seed, synchronize_rng_states

        device = in_a_group_of_one()

        def draw() -> list[float]:
            return torch.rand(4, device=device).tolist()  # type: ignore[no-any-return]

        set_seed(7)
        first = draw()
        state = capture_rng_state()
        second = draw()
        assert second != first
        restore_rng_state(state)
        assert draw() == second
        restore_rng_state(state)
        synchronize_rng_states(["cuda", "torch"])
        assert draw() == second
        set_seed(7)
        assert draw() == first
        expected = torch.rand(4, device=device, generator=torch.Generator(device).manual_seed(7)).tolist()
        return first == expected, [tensor.device.type for tensor in state["cuda"]]

    assert ranks(body, 1) == [(True, ["cpu"] * torch.cuda.device_count())]
