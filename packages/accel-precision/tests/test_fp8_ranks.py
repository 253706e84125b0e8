"""8-bit layers whose parameters are sharded, and gathered in 8 bits, train as those of DistributedDataParallel."""

from __future__ import annotations

import torch
from torch import nn

from accel_precision import AORecipeKwargs, PrecisionPolicy, fp8_step
from accel_state import PartialState


def train(sharded: bool) -> tuple[list[float], str]:
    """Losses of a rank, and what kind of tensor its parameters are."""
    from torchao.float8 import Float8LinearConfig

    state = PartialState(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 16))
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=sharded)
    policy = PrecisionPolicy.from_name("fp8", AORecipeKwargs(config=config))
    model = fp8_step(policy.fp8, sharded=sharded).apply(model, None)
    assert model[1].config.enable_fsdp_float8_all_gather == sharded
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(5 + state.process_index)
    losses = []
    for _ in range(4):
        inputs = torch.randn(16, 16, generator=draw)
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, type(next(model.parameters())).__name__


def test_sharded_eight_bit_layers_train_alike(ranks):
    replicated, sharded = ranks(train, 2, False, timeout_s=110), ranks(train, 2, True, timeout_s=110)
    assert [kind for _, kind in sharded] == ["DTensor", "DTensor"]
    assert [losses for losses, _ in sharded] == [losses for losses, _ in replicated]
    assert replicated[0][0] != replicated[1][0]
