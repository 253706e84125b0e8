"""What DistributedDataParallel does with a bucket of gradients instead of summing it in full precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Hook = Callable[[Any, Any], Any]


def average_as(dtype: torch.dtype) -> Hook:
    """A hook that averages gradients in `dtype`. torch refuses its own bf16 hook on gloo, where this one works."""

    def average_hook(group, bucket):  # type: ignore[no-untyped-def] # torch refuses annotations that are strings
        compressed = bucket.buffer().to(dtype).div_(dist.get_world_size(group))
        future = dist.all_reduce(compressed, group=group, async_op=True).get_future()

        def decompress(done: Any) -> Any:
            return bucket.buffer().copy_(_first(done))

        return future.then(decompress)

    return average_hook


def cast_around(hook: Hook, dtype: torch.dtype) -> Hook:
    """`hook`, run on buckets that were cast to `dtype`."""

    def cast_hook(state, bucket):  # type: ignore[no-untyped-def] # torch refuses annotations that are strings
        full = bucket.buffer()
        bucket.set_buffer(full.to(dtype))

        def decompress(done: Any) -> Any:
            return full.copy_(done.value())

        return hook(state, bucket).then(decompress)

    return cast_hook


def batched_power_sgd(state, bucket):  # type: ignore[no-untyped-def] # torch refuses annotations that are strings
    """Average a bucket, seen as one square matrix M, as the product of two thin ones (Vogels et al., "PowerSGD", 2019).

    One step of a power iteration: P = M Q, averaged and orthogonalised; Q = M' P, averaged; M becomes P Q'. What that
    loses is added to the next bucket. torch's hook of this name fails in its orthogonalisation (2.13).

    Args:
        state: torch's PowerSGDState, whose rank, first iteration, warm start, error feedback and memories are used.
        bucket: of gradients.

    Cost: two all-reduces of side x rank entries instead of one of side x side.
    """
    group = state.process_group if state.process_group is not None else dist.group.WORLD
    ranks, flat, index = dist.get_world_size(group), bucket.buffer(), bucket.index()
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        future = dist.all_reduce(flat.div_(ranks), group=group, async_op=True).get_future()
        return future.then(_first)
    side = math.ceil(math.sqrt(flat.numel()))
    matrix = torch.zeros(side * side, dtype=flat.dtype, device=flat.device)
    matrix[: flat.numel()] = flat
    if state.use_error_feedback and index in state.error_dict:
        matrix += state.error_dict[index]
    matrix = matrix.view(side, side)
    thin = state.q_memory_dict.get(index) if state.warm_start else None
    if thin is None:
        generator = torch.Generator().manual_seed(state.rng.randint(1_000_000_000))  # the same on every rank
        start = torch.randn(side, min(state.matrix_approximation_rank, side), generator=generator)
        thin = _orthogonal(start.to(flat.device)).to(flat.dtype)
    left = matrix @ thin
    dist.all_reduce(left, group=group)
    left = _orthogonal(left)
    right = matrix.t() @ left
    own = right.clone() if state.use_error_feedback else right  # the exchange sums into the other
    future = dist.all_reduce(right, group=group, async_op=True).get_future()

    def decompress(done: Any) -> Any:
        summed = _first(done)
        if state.use_error_feedback:
            state.error_dict[index] = (matrix - left @ own.t()).flatten()
        if state.warm_start:
            state.q_memory_dict[index] = _orthogonal(summed)
        state.maybe_increase_iter(bucket)
        return flat.copy_((left @ summed.t()).flatten()[: flat.numel()].div_(ranks))

    return future.then(decompress)


def _orthogonal(columns: Tensor) -> Tensor:
    """The same space by orthonormal columns; QR knows no half precision."""
    basis: Tensor = torch.linalg.qr(columns.float()).Q
    return basis.to(columns.dtype)


def _first(done: Any) -> Any:
    value = done.value()
    return value[0] if isinstance(value, list) else value
