import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_parallel import join_uneven_inputs, no_sync, trigger_sync_in_backward
from accel_state.errors import PlanError


def test_on_one_rank_everything_is_harmless():
    model = nn.Linear(1, 1)
    with no_sync(model), no_sync(), trigger_sync_in_backward(model):
        model(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad.item() == 1.0


def test_join_without_ddp_warns_and_runs():
    ran = []
    with pytest.warns(UserWarning, match=r"join_uneven_inputs has no effect here.*\['Linear'\]") as warned:  # noqa: SIM117
        with join_uneven_inputs([nn.Linear(1, 1)]):
            ran.append(True)
    assert warned[0].filename == __file__
    assert ran == [True]


def test_a_compiled_model_pauses_what_it_wraps(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        inner = DistributedDataParallel(nn.Linear(1, 1))
        with no_sync(torch.compile(inner, backend="eager")):
            assert not inner.require_backward_grad_sync
        assert inner.require_backward_grad_sync
    finally:
        dist.destroy_process_group()


def test_gradients_stay_local_until_the_window_ends(ranks):
    def body():
        import torch
        from torch import nn

        from accel_parallel import Accumulation, GradientAccumulationPlugin, Plan, PlanContext, ddp, no_sync, single
        from accel_state import GradientState, PartialState

        state = PartialState(cpu=True)
        x = torch.full((1, 1), 1.0 + state.process_index)
        net = nn.Linear(1, 1, bias=False)
        model = Plan([single(), ddp()]).apply(net, PlanContext(device=state.device, world_size=2))
        seen = []
        gradient_state = GradientState(GradientAccumulationPlugin(num_steps=2))
        accumulation = Accumulation(gradient_state)
        for _ in range(2):
            with accumulation.block((model,)):
                model(x).sum().backward()
            seen.append(net.weight.grad.item())
        net.weight.grad = None
        with no_sync(model):
            model(x).sum().backward()
        seen.append(net.weight.grad.item())
        gradient_state.plugin_kwargs["sync_each_batch"] = True
        net.weight.grad = None
        with accumulation.block((model,)):
            model(x).sum().backward()
        seen.append(net.weight.grad.item())
        return seen

    # local, then the mean of both micro-batches over ranks, local again, reduced in each micro-batch
    assert ranks(body, 2) == [[1.0, 3.0, 1.0, 1.5], [2.0, 3.0, 2.0, 1.5]]


def test_two_models_in_blocks_of_their_own_reduce_separately(ranks):
    def body():
        import torch
        from torch import nn

        from accel_parallel import Accumulation, GradientAccumulationPlugin, Plan, PlanContext, ddp, single
        from accel_state import GradientState, PartialState

        state = PartialState(cpu=True)
        x = torch.full((1, 1), 1.0 + state.process_index)
        context = PlanContext(device=state.device, world_size=2)
        nets = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        models = [Plan([single(), ddp()]).apply(net, context) for net in nets]
        gradient_state = GradientState(GradientAccumulationPlugin(num_steps=2))
        accumulation = Accumulation(gradient_state)
        flags, grads = [[], []], [[], []]
        for _ in range(4):
            for index, model in enumerate(models):
                with accumulation.block((model,)):
                    model(x).sum().backward()
                    flags[index].append(gradient_state.sync_gradients)
                    grads[index].append(nets[index].weight.grad.item())
                    if gradient_state.sync_gradients:
                        nets[index].weight.grad = None
        return flags, grads

    for rank, (flags, grads) in enumerate(ranks(body, 2)):
        assert flags == [[False, True] * 2] * 2
        assert grads == [[1.0 + rank, 3.0] * 2] * 2


def test_a_sync_can_be_triggered_after_forwards_without(ranks):
    def body():
        import torch
        from torch import nn

        from accel_parallel import Plan, PlanContext, ddp, no_sync, single, trigger_sync_in_backward
        from accel_state import PartialState

        state = PartialState(cpu=True)
        net = nn.Linear(2, 1, bias=False)
        model = Plan([single(), ddp()]).apply(net, PlanContext(device=state.device, world_size=2))
        rank = state.process_index
        with no_sync(model):
            loss_a = model(torch.tensor([[1.0 + rank, 0.0]])).sum()
            loss_b = model(torch.tensor([[0.0, 3.0 + rank]])).sum()
            loss_a.backward()
            local = net.weight.grad[0].tolist()
            with trigger_sync_in_backward(model):
                loss_b.backward()
            summed = net.weight.grad[0].tolist()
            still_off = model.require_backward_grad_sync
        net.weight.grad = None
        model(torch.tensor([[1.0 + rank, 1.0]])).sum().backward()  # the next ordinary step
        return local, summed, still_off, net.weight.grad[0].tolist()

    for rank, result in enumerate(ranks(body, 2)):
        assert result == ([1.0 + rank, 0.0], [1.5, 3.5], False, [1.5, 1.0])


def test_a_trigger_that_cannot_know_the_unused_parameters_is_refused(ranks):
    def body():
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        from accel_parallel import trigger_sync_in_backward
        from accel_state import PartialState

        PartialState(cpu=True)
        model = DistributedDataParallel(nn.Linear(1, 1), find_unused_parameters=True)
        try:
            with trigger_sync_in_backward(model):
                return "entered"
        except ValueError as error:
            return type(error).__name__, str(error)

    for kind, message in ranks(body, 2):
        assert kind == PlanError.__name__
        assert "find_unused_parameters=False" in message


def test_ranks_with_less_data_shadow_the_others(ranks):
    def body():
        import torch
        from torch import nn

        from accel_parallel import Plan, PlanContext, ddp, join_uneven_inputs, single
        from accel_state import PartialState

        state = PartialState(cpu=True)
        model = Plan([single(), ddp()]).apply(nn.Linear(1, 1), PlanContext(device=state.device, world_size=2))
        done = 0
        with join_uneven_inputs([model]):
            for _ in range(2 + 3 * state.process_index):
                model(torch.ones(1, 1)).sum().backward()
                done += 1
        return done

    assert ranks(body, 2) == [2, 5]


def test_layers_used_early_in_a_window_are_reduced_at_its_end(ranks):
    def body():
        import torch
        from torch import nn

        from accel_parallel import (
            Accumulation,
            DistributedDataParallelKwargs,
            GradientAccumulationPlugin,
            Plan,
            PlanContext,
            ddp,
            single,
        )
        from accel_state import GradientState, PartialState

        class Either(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.calls = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False), 0

            def forward(self, x):
                self.calls += 1
                return (self.a if self.calls % 2 else self.b)(x)

        state = PartialState(cpu=True)
        net = Either()
        step = ddp(DistributedDataParallelKwargs(find_unused_parameters=True))
        model = Plan([single(), step]).apply(net, PlanContext(device=state.device, world_size=2))
        accumulation = Accumulation(GradientState(GradientAccumulationPlugin(num_steps=2)))
        for _ in range(2):
            with accumulation.block((model,)):
                model(torch.ones(1, 1) * (state.process_index + 1)).sum().backward()
        return net.a.weight.grad.item(), net.b.weight.grad.item()

    assert ranks(body, 2) == [(1.5, 1.5)] * 2


def test_sharded_models_pause_too(ranks):
    def body():
        import torch
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from accel_parallel import no_sync
        from accel_state import PartialState

        state = PartialState(cpu=True)
        net = fully_shard(nn.Linear(2, 2, bias=False), mesh=init_device_mesh("cpu", (2,)))
        x = torch.ones(1, 2) * (state.process_index + 1)
        with no_sync(net):
            net(x).sum().backward()
        paused = net.weight.grad is None
        net(x).sum().backward()
        return paused, net.weight.grad.full_tensor().flatten().tolist()

    assert ranks(body, 2) == [(True, [3.0] * 4)] * 2
