"""Two ranks: the plan against DDP written by hand, and against one rank with the whole batch."""

import pytest
import torch

UPDATES = 20


def train(ours: bool, steps: int, clip: bool, whole_batch: bool = False):
    """Weights after 20 SGD updates on this rank's half of each batch; the last window of three batches is ragged."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from accel_parallel import (
        Accumulation,
        GradientAccumulationPlugin,
        NativeEngine,
        Plan,
        PlanContext,
        Prepared,
        ddp,
        single,
    )
    from accel_state import GradientState, PartialState

    state = PartialState(cpu=True)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    rank, world = (0, 1) if whole_batch else (state.process_index, state.num_processes)
    batches = UPDATES * steps - (steps - 1)
    data = torch.randn(batches, 8, 6)
    target = torch.randn(batches, 8, 3)
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def part(t):
        return t[rank::world]

    if ours:
        gradient_state = GradientState(GradientAccumulationPlugin(num_steps=steps))
        accumulation = Accumulation(gradient_state)
        context = PlanContext(device=state.device, world_size=state.num_processes)
        engine = NativeEngine(Plan([single(), ddp()]), context, gradient_state=gradient_state)
        out = engine.prepare(Prepared(models=(net,), optimizers=(inner,)))
        (model,), (optimizer,) = out.models, out.optimizers
        loader = type("Loader", (), {"end_of_dataloader": False, "remainder": -1})()
        gradient_state._add_dataloader(loader)
        for index in range(batches):
            loader.end_of_dataloader = index == batches - 1
            with accumulation.block((model,)):
                engine.backward((model(part(data[index])) - part(target[index])).pow(2).mean())
                if gradient_state.sync_gradients and clip:
                    engine.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
    else:
        model = net if whole_batch else DistributedDataParallel(net)
        for index in range(batches):
            is_update = (index + 1) % steps == 0 or index == batches - 1
            if not whole_batch:
                model.require_backward_grad_sync = is_update
            loss = (model(part(data[index])) - part(target[index])).pow(2).mean()
            (loss / steps if steps > 1 else loss).backward()
            if is_update:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                inner.step()
                inner.zero_grad()
    dist.barrier()
    return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


def test_equals_hand_written_ddp_bit_for_bit_and_one_rank_closely(ranks):
    cases = [(steps, clip) for steps in (1, 3) for clip in (False, True)]

    def body(train, cases):
        return [(train(True, *case), train(False, *case), train(False, *case, whole_batch=True)) for case in cases]

    first, second = ranks(body, 2, train, cases)
    for case, weights, others in zip(cases, first, second, strict=True):
        ours, by_hand, one_rank = (torch.tensor(values) for values in weights)
        assert torch.equal(ours, by_hand), case
        assert torch.equal(ours, torch.tensor(others[0])), f"the ranks' replicas differ: {case}"
        assert (ours - one_rank).abs().max() < 1e-6, case


def test_options_reach_ddp_and_preparing_twice_wraps_once(ranks):
    def body():
        from torch import nn

        from accel_parallel import DistributedDataParallelKwargs, Plan, PlanContext, ddp, single
        from accel_state import PartialState

        state = PartialState(cpu=True)
        context = PlanContext(device=state.device, world_size=state.num_processes)
        handler = DistributedDataParallelKwargs(
            find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=1
        )
        plan = Plan([single(), ddp(handler)])
        model = plan.apply(nn.Linear(2, 2), context)
        again = plan.apply(model, context)
        frozen = nn.Linear(2, 2).requires_grad_(False)
        return (
            model.find_unused_parameters,
            model.gradient_as_bucket_view,
            model.bucket_bytes_cap,
            again is model,
            plan.apply(frozen, context) is frozen,
        )

    assert ranks(body, 2) == [(True, True, 1024 * 1024, True, True)] * 2


def test_a_context_that_contradicts_the_group_is_refused(ranks):
    def body():
        import torch
        from torch import nn

        from accel_parallel import Plan, PlanContext, ddp, single
        from accel_state import PartialState

        PartialState(cpu=True)
        try:
            Plan([single(), ddp()]).apply(nn.Linear(1, 1), PlanContext(device=torch.device("cpu"), world_size=3))
        except ValueError as error:
            return str(error)
        return "nothing was raised"

    for message in ranks(body, 2):
        assert "the context says 3 ranks, the process group has 2" in message


POWER_SGD = {"comm_hook": "power_sgd", "comm_state_option": {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}}
HOOKS = [
    ({"comm_hook": "fp16"}, 2e-3),
    ({"comm_hook": "bf16"}, 2e-2),
    ({"comm_wrapper": "bf16"}, 2e-2),
    ({"comm_hook": "fp16", "comm_wrapper": "bf16"}, 2e-2),
    (POWER_SGD, 1e-6),  # its first iterations are not compressed
    ({**POWER_SGD, "comm_wrapper": "fp16"}, 2e-3),
    ({**POWER_SGD, "comm_hook": "batched_power_sgd"}, 1e-6),
]


def test_compressed_gradients_are_close_to_the_mean(ranks):
    def body(all_options):
        import torch
        from torch import nn

        from accel_parallel import DistributedDataParallelKwargs, Plan, PlanContext, ddp, single
        from accel_state import PartialState

        state = PartialState(cpu=True)
        torch.manual_seed(0)
        net, x = nn.Linear(8, 8), torch.randn(2, 4, 8)
        gradients = []
        for part in x:
            net.zero_grad()
            net(part).pow(2).mean().backward()
            gradients.append(net.weight.grad.clone())
        context = PlanContext(device=state.device, world_size=2)
        out = []
        for options in all_options:
            net.zero_grad()
            model = Plan([single(), ddp(DistributedDataParallelKwargs(**options))]).apply(net, context)
            model(x[state.process_index]).pow(2).mean().backward()
            out.append(((net.weight.grad - sum(gradients) / 2).abs().max().item(), net.weight.grad.flatten().tolist()))
        return out

    first, second = ranks(body, 2, [options for options, _ in HOOKS])
    for (options, tolerance), mine, theirs in zip(HOOKS, first, second, strict=True):
        assert mine[1] == theirs[1], options
        assert mine[0] < tolerance, options
        is_compressed = "fp16" in options.values() or "bf16" in options.values()
        assert (mine[0] > 1e-7) == is_compressed, options


def test_hooks_are_checked_when_they_are_named():
    from accel_parallel import DistributedDataParallelKwargs

    with pytest.raises(ValueError, match="comm_wrapper='power_sgd' is not allowed"):
        DistributedDataParallelKwargs(comm_wrapper="power_sgd")
    with pytest.raises(ValueError, match="zip"):
        DistributedDataParallelKwargs(comm_hook="zip")
    handler = DistributedDataParallelKwargs(bucket_cap_mb=3, comm_hook="fp16")
    assert handler.to_kwargs() == {"bucket_cap_mb": 3}
    assert handler.comm_hook == "fp16"


def test_unused_parameters_are_named_with_the_option(ranks):
    def body():
        import torch
        from torch import nn

        from accel_parallel import Plan, PlanContext, ddp, single
        from accel_state import PartialState

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.frozen = nn.Linear(1, 1).requires_grad_(False)
                self.used, self.spare = nn.Linear(1, 1), nn.Linear(1, 1)

            def forward(self, x):
                return self.used(x)

        state = PartialState(cpu=True)
        model = Plan([single(), ddp()]).apply(Net(), PlanContext(device=state.device, world_size=2))
        model(torch.ones(1, 1)).sum().backward()
        try:
            model(torch.ones(1, 1))
        except RuntimeError as error:
            return str(error)
        return "nothing was raised"

    for message in ranks(body, 2):
        assert message.startswith("spare.weight, spare.bias had no part in the loss of the last backward")
        assert "DistributedDataParallelKwargs(find_unused_parameters=True)" in message


def test_batched_power_sgd_trains_through_its_compression(ranks):
    def body():
        import torch
        from torch import nn

        from accel_parallel import DistributedDataParallelKwargs, Plan, PlanContext, ddp, single
        from accel_state import PartialState

        state = PartialState(cpu=True)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5))
        options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
        handler = DistributedDataParallelKwargs(comm_hook="batched_power_sgd", comm_state_option=options)
        model = Plan([single(), ddp(handler)]).apply(net, PlanContext(device=state.device, world_size=2))
        losses = []
        for update in range(40):
            torch.manual_seed(2 * update + state.process_index)
            x = torch.randn(16, 20)
            loss = (model(x) - x[:, :5]).pow(2).mean()
            loss.backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.3 * parameter.grad
            net.zero_grad()
            losses.append(loss.item())
        return losses[0], losses[-1], [p.detach() for p in net.parameters()]

    (first, last, mine), (_, _, theirs) = ranks(body, 2)
    assert last < 0.1 < first
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
