import copy

import pytest
import torch
from torch import nn

from accel_parallel import FullyShardedDataParallelPlugin, Plan, PlanContext, activation_checkpointing, single
from accel_parallel.steps.activation_checkpointing import checkpointing_of, is_checkpointed
from accel_state.errors import PlanError, SettingError
from accel_testkit.nets import next_token_loss
from accel_testkit.training import single_truth, tied_net, tokens, train

CPU = PlanContext(device=torch.device("cpu"))


def calls_of_forward(model):
    """How often each block ran its original forward."""
    counts = []
    for index, block in enumerate(model.blocks):
        counts.append(0)

        def counted(x, index=index, forward=block.forward):
            counts[index] += 1
            return forward(x)

        block.forward = counted
    return counts


@pytest.mark.parametrize(
    ("options", "again"),
    [({}, [2, 2]), ({"every": 2}, [2, 1]), ({"wrap": "blocks.1"}, [1, 2]), ({"mode": "selective"}, [2, 2])],
)
def test_blocks_are_computed_anew_and_gradients_stay(options, again):
    want, model = tied_net(), tied_net()
    names, counts = list(model.state_dict()), calls_of_forward(model)
    plan = Plan([single(), activation_checkpointing(**options)])
    assert plan.apply(plan.apply(model, CPU), CPU) is model
    assert list(model.state_dict()) == names == [name for name, _ in want.state_dict().items()]
    for net in (want, model):
        next_token_loss(net(tokens()[0]), tokens()[0]).backward()
    assert counts == again
    for (name, a), b in zip(want.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_the_selective_mode_keeps_matrices():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return func(*args, **(kwargs or {}))

    def products(*steps):
        model = Plan([single(), *steps]).apply(tied_net(), CPU)
        with Count() as counter:
            next_token_loss(model(tokens()[0]), tokens()[0]).backward()
        return counter.products

    plain = products()
    assert products(activation_checkpointing("selective")) == plain
    assert products(activation_checkpointing("full")) > plain


def test_inputs_can_wait_on_the_cpu(monkeypatch):
    packed = []
    original = torch.autograd.graph.save_on_cpu

    class Noted(original):
        def __init__(self, pin_memory):
            packed.append(pin_memory)
            super().__init__(pin_memory=pin_memory)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Noted)
    model = Plan([single(), activation_checkpointing(offload=True)]).apply(tied_net(), CPU)
    next_token_loss(model(tokens()[0]), tokens()[0]).backward()
    assert packed == [False, False]


def test_a_copy_has_parameters_of_its_own():
    model = Plan([single(), activation_checkpointing()]).apply(tied_net(), CPU)
    other = copy.deepcopy(model)
    next_token_loss(other(tokens()[0]), tokens()[0]).backward()
    assert is_checkpointed(other.blocks[0])
    assert other.blocks[0].up.weight.grad is not None and model.blocks[0].up.weight.grad is None


def test_what_cannot_be_done_is_said():
    with pytest.raises(SettingError, match="mode='half' does not exist: use one of full, selective"):
        activation_checkpointing("half")
    with pytest.raises(SettingError, match="every=0"):
        activation_checkpointing(every=0)
    with pytest.raises(PlanError, match="Linear has no repeated blocks"):
        Plan([single(), activation_checkpointing()]).apply(nn.Linear(1, 1), CPU)
    model = tied_net()
    model.is_gradient_checkpointing = True
    with pytest.raises(PlanError, match="checkpoints its blocks itself"):
        Plan([single(), activation_checkpointing()]).apply(model, CPU)
    assert "of 1 of 2 blocks computed anew" in Plan([activation_checkpointing(every=2)]).explain(tied_net())
    assert "activations of the blocks computed anew" in Plan([activation_checkpointing()]).explain()


@pytest.mark.parametrize("version", [1, 2])
def test_it_composes_with_sharding_by_the_plugin(ranks, version):
    def body(version):
        from accel_parallel import NativeEngine, Prepared, fsdp1, fsdp2, full_state_dict
        from accel_state import PartialState

        state = PartialState(cpu=True)
        context = PlanContext(device=state.device, world_size=2)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version, auto_wrap_policy="TRANSFORMER_BASED_WRAP", activation_checkpointing=True
        )
        model = tied_net()
        counts = calls_of_forward(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        steps = [checkpointing_of(plugin), (fsdp1 if version == 1 else fsdp2)(plugin)]
        engine = NativeEngine(Plan(steps), context)
        ready = engine.prepare(Prepared(models=(model,), optimizers=(optimizer,)))
        (model,), (optimizer,) = ready.models, ready.optimizers
        mine = [batch.chunk(2)[state.process_index] for batch in tokens()]
        return train(model, optimizer, mine, engine.clip_grad_norm_), full_state_dict(model), counts

    (want_norms, want), got = single_truth(), ranks(body, 2, version)
    assert all(counts == [6, 6] for _, _, counts in got)
    assert got[0][0] == pytest.approx(want_norms, rel=1e-5)
    for name, value in want.items():
        assert (got[0][1][name] - value).abs().max() < 1e-6, name
