import pytest
import torch
from torch import nn

from accel_parallel import FullyShardedDataParallelPlugin, Plan, PlanContext, fsdp1
from accel_state.errors import PlanError
from accel_testkit.training import single_truth, tied_net, tokens, train

CPU = PlanContext(device=torch.device("cpu"), world_size=2)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_it_equals_one_device(ranks, strategy, use_orig_params):
    def body(strategy, use_orig_params):
        from accel_parallel import (
            FullyShardedDataParallelPlugin,
            NativeEngine,
            Plan,
            PlanContext,
            Prepared,
            extract_model_from_parallel,
            fsdp1,
            full_state_dict,
        )  # fmt: skip
        from accel_state import GradientState, PartialState

        state = PartialState(cpu=True)
        plugin = FullyShardedDataParallelPlugin(
            sharding_strategy=strategy, use_orig_params=use_orig_params, auto_wrap_policy="TRANSFORMER_BASED_WRAP"
        )
        net = tied_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        context = PlanContext(device=state.device, world_size=2)
        engine = NativeEngine(Plan([fsdp1(plugin)]), context, gradient_state=GradientState())
        ready = engine.prepare(Prepared(models=(net,), optimizers=(optimizer,)))
        (model,), (optimizer,) = ready.models, ready.optimizers
        assert engine.prepare_model(model) is model
        assert extract_model_from_parallel(model) is net
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        assert set(held) == {id(p) for p in model.parameters()}
        mine = [batch.chunk(2)[state.process_index] for batch in tokens()]
        return train(model, optimizer, mine, engine.clip_grad_norm_), full_state_dict(model)

    want_norms, want = single_truth()
    (norms, state), (_, elsewhere) = ranks(body, 2, strategy, use_orig_params)
    assert norms == pytest.approx(want_norms, rel=1e-5)
    assert elsewhere == {}
    for name, value in want.items():
        assert (state[name] - value).abs().max() < 1e-6, name


def test_a_frozen_part_of_a_unit_and_hybrids_on_the_cpu_are_refused(ranks):
    def body():
        from accel_state import PartialState

        PartialState(cpu=True)
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        net[0].requires_grad_(False)
        answers = []
        for fields in ({}, {"sharding_strategy": "HYBRID_SHARD", "use_orig_params": True}):
            try:
                Plan([fsdp1(FullyShardedDataParallelPlugin(**fields))]).apply(net, CPU)
            except PlanError as error:
                answers.append(str(error))
        return answers

    for frozen, hybrid in ranks(body, 2):
        assert "Sequential has trained and frozen parameters" in frozen and "use_orig_params=True" in frozen
        assert "dp_replicate_size" in hybrid


def test_a_part_of_the_parameters_cannot_be_clipped(ranks):
    def body():
        from accel_parallel import FullyShardedDataParallelPlugin, NativeEngine, Plan, fsdp1
        from accel_state import GradientState, PartialState

        PartialState(cpu=True)
        plugin = FullyShardedDataParallelPlugin(use_orig_params=True)
        engine = NativeEngine(Plan([fsdp1(plugin)]), CPU, gradient_state=GradientState())
        model = engine.prepare_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        try:
            engine.clip_grad_norm_(list(model.parameters())[:2], 1.0)
        except PlanError as error:
            return str(error)

    assert all("2 of the 4 parameters" in text for text in ranks(body, 2))


def test_groups_that_share_a_flat_parameter_are_refused(ranks):
    def body():
        from accel_parallel import FullyShardedDataParallelPlugin, NativeEngine, Plan, Prepared, fsdp1
        from accel_state import GradientState, PartialState

        PartialState(cpu=True)
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD([{"params": [net.weight]}, {"params": [net.bias], "lr": 0.5}], lr=0.1)
        plan = Plan([fsdp1(FullyShardedDataParallelPlugin())])
        try:
            NativeEngine(plan, CPU, gradient_state=GradientState()).prepare(
                Prepared(models=(net,), optimizers=(optimizer,))
            )
        except PlanError as error:
            return str(error)

    assert all("different groups of the optimizer lie in one flat parameter" in text for text in ranks(body, 2))
