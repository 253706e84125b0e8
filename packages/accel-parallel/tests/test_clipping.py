import pytest
import torch
from torch import nn

from accel_parallel import clip_grad_norm_, clip_grad_value_, total_norm
from accel_testkit.nets import TP_PLAN, next_token_loss
from accel_testkit.training import tied_net, tokens


def with_grads(scale: float = 3.0) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    (net(torch.randn(8, 4)).pow(2).mean() * scale).backward()
    return net


def grads(net) -> list[torch.Tensor]:
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3, float("inf")])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_equals_torch(norm_type, max_norm):
    ours, theirs = with_grads(), with_grads()
    norm = clip_grad_norm_(ours.parameters(), max_norm, norm_type)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type))
    assert all(torch.equal(a, b) for a, b in zip(grads(ours), grads(theirs), strict=True))


def test_generators_single_tensors_and_missing_gradients():
    net = with_grads()
    whole = total_norm(list(net.parameters()))
    assert torch.equal(clip_grad_norm_((p for p in net.parameters()), 1e6), whole)
    net[0].weight.grad = None
    assert clip_grad_norm_((p for p in net.parameters()), 1e6) < whole
    assert clip_grad_norm_(net[1].weight, 1e6) == net[1].weight.grad.norm()
    assert clip_grad_norm_([], 1.0) == 0.0


def test_total_norm_changes_nothing():
    net = with_grads()
    before = [g.clone() for g in grads(net)]
    total_norm(net.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, grads(net), strict=True))


def test_values_are_clamped():
    net = with_grads(100.0)
    clip_grad_value_((p for p in net.parameters()), 0.25)
    assert max(g.abs().max().item() for g in grads(net)) == 0.25


def test_a_bad_norm_is_an_error_on_request():
    net = with_grads()
    net[0].weight.grad.fill_(float("nan"))
    assert clip_grad_norm_(net.parameters(), 1.0).isnan()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)


def test_one_norm_over_sharded_and_plain_gradients(ranks):
    def body():
        import torch
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from accel_parallel import clip_grad_norm_, clip_grad_value_
        from accel_state import PartialState

        PartialState(cpu=True)

        def make():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
            net(torch.ones(2, 4)).pow(2).sum().backward()
            return net

        single = make()
        want = nn.utils.clip_grad_norm_(single.parameters(), 0.5)
        mixed = make()
        mixed.zero_grad()
        fully_shard(mixed[0], mesh=init_device_mesh("cpu", (2,)))  # the other layer stays whole, with equal gradients
        mixed(torch.ones(2, 4)).pow(2).sum().backward()
        got = clip_grad_norm_(mixed.parameters(), 0.5)
        whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in mixed.parameters()]
        diff = max((a - b.grad).abs().max().item() for a, b in zip(whole, single.parameters(), strict=True))
        clip_grad_value_(mixed.parameters(), 0.01)
        top = max(p.grad.abs().max().item() for p in mixed[1].parameters())
        return got.item() - want.item(), diff, top

    for norm_error, gradient_error, top in ranks(body, 2):
        assert abs(norm_error) < 1e-5
        assert gradient_error < 1e-6
        assert top == pytest.approx(0.01)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2", "fsdp2+tp"])
def test_inside_a_window_the_norm_so_far_is_told_and_nothing_changes(ranks, strategy):
    def body(strategy):
        from accel_parallel import (
            Accumulation,
            FullyShardedDataParallelPlugin,
            GradientAccumulationPlugin,
            NativeEngine,
            ParallelismConfig,
            Plan,
            PlanContext,
            Prepared,
            ddp,
            fsdp1,
            fully_shard_blocks,
            single,
            tensor_parallel,
        )
        from accel_state import GradientState, PartialState

        state = PartialState(cpu=True)
        sizes = {"dp_shard_size": 2, "tp_size": 2} if strategy == "fsdp2+tp" else None
        mesh = None if sizes is None else ParallelismConfig(**sizes).build_device_mesh("cpu")
        context = PlanContext(device=state.device, world_size=state.num_processes, mesh=mesh)
        steps = {
            "ddp": [single(), ddp()],
            "fsdp1": [fsdp1(FullyShardedDataParallelPlugin(fsdp_version=1))],
            "fsdp2": [fully_shard_blocks()],
            "fsdp2+tp": [tensor_parallel(TP_PLAN), fully_shard_blocks()],
        }[strategy]
        gradient_state = GradientState(GradientAccumulationPlugin(num_steps=3))
        engine = NativeEngine(Plan(steps), context, gradient_state=gradient_state)
        (model,) = engine.prepare(Prepared(models=(tied_net(),))).models
        accumulation, part = Accumulation(gradient_state), state.process_index // (state.num_processes // 2)
        norms = []
        for batch in tokens(3):
            with accumulation.block((model,)):
                mine = batch.chunk(2)[part]
                engine.backward(next_token_loss(model(mine), mine))
                norms.append([engine.clip_grad_norm_(model.parameters(), 0.01).item() for _ in range(2)])
        return part, norms

    def local_norms(part):
        model, norms = tied_net(), []
        for batch in tokens(2):
            mine = batch.chunk(2)[part]
            (next_token_loss(model(mine), mine) / 3).backward()
            norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        return norms

    whole = tied_net()
    for batch in tokens(3):
        (next_token_loss(whole(batch), batch) / 3).backward()
    final = nn.utils.get_total_norm([p.grad for p in whole.parameters()]).item()
    for part, norms in ranks(body, 4 if strategy == "fsdp2+tp" else 2, strategy):
        for (first, again), want in zip(norms[:2], local_norms(part), strict=True):
            assert first == again == pytest.approx(want, rel=1e-5)
        assert norms[2] == pytest.approx([final, 0.01], rel=1e-4)  # clipped at the end, and to that
