"""Replicas of stages have equal gradients at the end of each window.

DistributedDataParallel reduces in hooks of backward, which a schedule that runs many small ones would confuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUCKET_BYTES = 32 * 2**20  # as much extra memory, for messages that are long enough to be cheap


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """The mean of the replicas' gradients, in place. A parameter without one on some replica counts as zero there.

    Cost: one all-reduce per 32 MB of gradients.
    """
    count = dist.get_world_size(group)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets(parameter.grad for parameter in trained if parameter.grad is not None):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(count)
        dist.all_reduce(flat, group=group)
        parts = flat.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)])


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size + gradient.nbytes > _BUCKET_BYTES or gradient.dtype is not bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
