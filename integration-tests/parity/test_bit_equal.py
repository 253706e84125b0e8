"""DDP and FSDP2 through us and by hand in raw torch, on the same two ranks, give the same weights bit for bit."""

from __future__ import annotations

import pytest

from accel_state.testing import run_ranks

ACCUMULATION = 2


def batches():
    """Eight micro-batches of this rank: four updates."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(1 + dist.get_rank())
    return torch.randint(0, 64, (8, 4, 16))


def by_hand(kind: str, precision: str):
    """The loop as one writes it in torch alone."""
    from contextlib import nullcontext

    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from accel_testkit.nets import next_token_loss
    from accel_testkit.training import tied_net

    is_bf16, net = precision == "bf16", tied_net()
    if kind == "ddp":
        model = DistributedDataParallel(net)
    else:
        dtype = torch.bfloat16 if is_bf16 else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        model = net
        for unit in (*net.blocks, net):
            fully_shard(unit, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, batch in enumerate(batches(), 1):
        is_update = number % ACCUMULATION == 0
        if kind == "fsdp2":
            model.set_requires_gradient_sync(is_update)
        with model.no_sync() if kind == "ddp" and not is_update else nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
                logits = model(batch)
            (next_token_loss(logits.float(), batch) / ACCUMULATION).backward()
        if is_update:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return {name: whole(value) for name, value in net.state_dict().items()}


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def through_accelerator(kind: str, precision: str):
    """The same with the library."""
    import torch

    from accel import Accelerator
    from accel_parallel import FullyShardedDataParallelPlugin
    from accel_testkit.nets import next_token_loss
    from accel_testkit.training import tied_net

    plugin = None
    if kind == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, mixed_precision=precision, gradient_accumulation_steps=ACCUMULATION
    )
    net = tied_net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    for batch in batches():
        with accelerator.accumulate(model):
            accelerator.backward(next_token_loss(model(batch), batch))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return {name: whole(value) for name, value in accelerator.unwrap_model(model).state_dict().items()}


def both(kind: str, precision: str):
    ours = through_accelerator(kind, precision)  # first: it makes the process group
    return ours, by_hand(kind, precision)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_our_weights_are_those_of_raw_torch(kind, precision):
    (ours, theirs), (others, _) = run_ranks(both, 2, kind, precision)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name] == value).all(), name
        assert (ours[name] == others[name]).all(), name
