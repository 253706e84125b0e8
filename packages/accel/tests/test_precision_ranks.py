"""Mixed precision through the Accelerator, on two ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def entry_point(precision: str):
    """Weights after three updates by `encode`, and in which types it computed."""
    from accel import Accelerator, GradScalerKwargs

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.seen = nn.Linear(4, 2), set()
            self.inner.register_forward_hook(lambda layer, args, out: self.seen.add(str(out.dtype)))

        def forward(self, x):
            raise AssertionError("encode was asked for")

        def encode(self, x):
            return self.inner(x)

    handlers = [GradScalerKwargs(init_scale=128.0)] if precision == "fp16" else []
    accelerator = Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=handlers)
    torch.manual_seed(0)
    net, batches = Net(), torch.randn(3, 8, 4)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.register_forward_method(model, "encode")
    for batch in batches:
        part = batch[accelerator.process_index :: accelerator.num_processes]
        accelerator.backward(model.encode(part).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return [value for p in net.parameters() for value in p.flatten().tolist()], sorted(net.seen)


@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [("no", "float32", 1e-6), ("bf16", "bfloat16", 2e-2), ("fp16", "float16", 2e-3)],
)
def test_a_registered_method_trains_as_on_one_process(ranks, precision, dtype, tolerance):
    (alone, seen), *_ = ranks(entry_point, 1, precision)
    first, second = ranks(entry_point, 2, precision)
    assert first == second
    assert seen == first[1] == [f"torch.{dtype}"]
    assert first[0] == pytest.approx(alone, abs=tolerance)


def overflow(sharded: bool):
    """What each of three updates did; the second overflows, under sharding in rank 1's part alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from accel import Accelerator, GradScalerKwargs

    handler = GradScalerKwargs(init_scale=4.0, growth_interval=1000)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler])
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        accelerator.policy.wrap(model, "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if not sharded:
        model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    scheduler = accelerator.prepare_scheduler(scheduler, per="update")
    seen = []
    for update in range(3):
        x = torch.ones(2, 4)
        if update == 1 and not sharded and accelerator.process_index == 1:
            x[0, 0] = float("inf")
        accelerator.backward(model(x).sum())
        if update == 1 and sharded and accelerator.process_index == 1:
            next(model.parameters()).grad.to_local()[0, 0] = float("inf")
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        (weight,) = model.parameters()
        weight = weight.full_tensor() if sharded else weight
        skipped = accelerator.optimizer_step_was_skipped
        seen.append((skipped, bool(norm.isfinite()), scheduler.get_last_lr(), accelerator.scaler.get_scale()))
        seen.append(weight.flatten().tolist())
    return seen


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fully_shard"])
def test_an_overflow_on_one_rank_skips_update_and_schedule_on_all(ranks, sharded):
    first, second = ranks(overflow, 2, sharded)
    assert first[0::2] == second[0::2]
    assert first[0::2] == [(False, True, [0.05], 4.0), (True, False, [0.05], 2.0), (False, True, [0.025], 2.0)]
    before, after, last = first[1::2]
    assert before == after != last
    assert first[1::2] == second[1::2]
