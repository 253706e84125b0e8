import pytest
import torch
from torch import nn

from accel_parallel import Plan, PlanContext, fully_shard_blocks, single
from accel_state.errors import PlanError
from accel_testkit.training import single_truth, tied_net, tokens, train


def test_without_ranks_it_says_how_to_get_them():
    with pytest.raises(PlanError, match=r"no process group to shard over.*one process will do"):
        Plan([fully_shard_blocks(None)]).apply(nn.Linear(2, 2), PlanContext(device=torch.device("cpu")))


def test_explain_says_what_each_rank_holds():
    model = nn.Sequential(nn.ModuleList(nn.Linear(10, 10) for _ in range(2)), nn.Linear(10, 78))
    text = Plan([fully_shard_blocks()]).explain(model, PlanContext(device=torch.device("cpu"), world_size=2))
    assert "parameters (4.3 kB) shared over 2 ranks, 2.2 kB each, in 3 units; 6.5 kB sent per rank and update" in text
    assert "shared over 2 ranks" in Plan([fully_shard_blocks()]).explain(
        context=PlanContext(device=torch.device("cpu"), world_size=2)
    )


def test_it_takes_the_place_of_ddp():
    from accel_parallel import ddp

    with pytest.raises(PlanError, match="both take the slot 'data_parallel'"):
        Plan([single(), fully_shard_blocks(), ddp()])


@pytest.mark.parametrize(
    ("options", "sizes", "n"),
    [
        ({}, {"dp_shard_size": 2}, 2),
        ({"wrap": None}, None, 2),
        ({"wrap": ["blocks.*"], "reshard_after_forward": False}, {"dp_shard_size": 2}, 2),
        ({"wrap": 5000}, {"dp_shard_size": 2}, 2),
        ({"wrap": "blocks.1"}, {"dp_replicate_size": 2, "dp_shard_size": 2}, 4),
    ],
)
def test_it_equals_one_device(ranks, options, sizes, n):
    def body(options, sizes):
        from accel_parallel import (
            NativeEngine,
            ParallelismConfig,
            Plan,
            PlanContext,
            Prepared,
            clip_grad_norm_,
            full_state_dict,
            fully_shard_blocks,
        )  # fmt: skip
        from accel_state import PartialState

        state = PartialState(cpu=True)
        mesh = None if sizes is None else ParallelismConfig(**sizes).build_device_mesh("cpu")
        context = PlanContext(device=state.device, world_size=state.num_processes, mesh=mesh)
        model = tied_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        engine = NativeEngine(Plan([fully_shard_blocks(**options)]), context)
        ready = engine.prepare(Prepared(models=(model,), optimizers=(optimizer,)))
        (model,), (optimizer,) = ready.models, ready.optimizers
        assert engine.prepare_model(model) is model
        mine = [batch.chunk(state.num_processes)[state.process_index] for batch in tokens()]
        norms = train(model, optimizer, mine, clip_grad_norm_)
        assert model.logits.weight is model.embedding.weight
        return norms, full_state_dict(model)

    (want_norms, want), got = single_truth(), ranks(body, n, options, sizes)
    for norms, _ in got:
        assert norms == pytest.approx(want_norms, rel=1e-5)
    assert all(state == {} for _, state in got[1:])
    for name, value in want.items():
        assert (got[0][1][name] - value).abs().max() < 1e-6, name


def test_values_come_from_rank_0_for_models_on_the_meta_device(ranks):
    def body():
        import torch.distributed as dist

        from accel_parallel import Plan, PlanContext, full_state_dict, fully_shard_blocks
        from accel_state import PartialState

        state = PartialState(cpu=True)
        context = PlanContext(device=state.device, world_size=2)
        answers = []
        for from_rank_0 in (True, False):
            if state.is_main_process:
                model = tied_net()
                model.register_buffer("counts", torch.arange(3.0))
            else:
                with torch.device("meta"):
                    model = tied_net()
                    model.register_buffer("counts", torch.arange(3.0))
            Plan([fully_shard_blocks(from_rank_0=from_rank_0)]).apply(model, context)
            assert model.logits.weight is model.embedding.weight
            assert not any(p.is_meta for p in model.parameters())
            assert model.counts.tolist() == [0, 1, 2]
            answers.append(full_state_dict(model))
        with torch.device("meta"):
            empty = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        try:
            Plan([fully_shard_blocks(None)]).apply(empty, context)
        except ValueError as error:
            answers.append(str(error))
        torch.manual_seed(dist.get_rank())
        Plan([fully_shard_blocks(None, param_init_fn=lambda module: module.reset_parameters())]).apply(empty, context)
        return answers, full_state_dict(empty)

    want = tied_net().state_dict()
    (first, made), (second, _) = ranks(body, 2)
    for state in first[:2]:
        assert all(torch.equal(state[name], value) for name, value in want.items())
    assert "nobody has its values" in first[2] and first[2] == second[2]
    torch.manual_seed(0)
    assert torch.equal(made["0.weight"], nn.Linear(4, 4).weight)


def test_replicas_begin_alike(ranks):
    def body():
        from accel_parallel import ParallelismConfig, Plan, PlanContext, fully_shard_blocks
        from accel_state import PartialState

        state = PartialState(cpu=True)
        mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2).build_device_mesh("cpu")
        torch.manual_seed(state.process_index)
        model = nn.Linear(4, 4)
        Plan([fully_shard_blocks(None)]).apply(model, PlanContext(device=state.device, world_size=4, mesh=mesh))
        return model.weight.to_local().tolist()

    first, second, third, fourth = ranks(body, 4)
    assert first == third and second == fourth and first != second


def test_an_optimizer_made_before_keeps_its_state_and_groups(ranks):
    def body():
        from accel_parallel import NativeEngine, Plan, PlanContext, Prepared, fully_shard_blocks
        from accel_state import PartialState

        state = PartialState(cpu=True)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
        optimizer = torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=2.0)
        engine = NativeEngine(Plan([fully_shard_blocks(None)]), PlanContext(device=state.device, world_size=2))
        engine.prepare(Prepared(models=(model,)))
        (wrapped,) = engine.prepare(Prepared(optimizers=(optimizer,))).optimizers
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
        sums = [optimizer.state[p]["sum"] for p in held]
        assert len(optimizer.state) == 4
        model(torch.ones(1, 4)).sum().backward()
        wrapped.step()
        return [(tuple(s.shape), s.to_local().min().item() >= 2.0, s.placements == p.placements)
                for s, p in zip(sums, held, strict=True)]  # fmt: skip

    for answer in ranks(body, 2):
        assert answer == [(shape, True, True) for shape in [(4, 4), (4,), (2, 4), (2,)]]


def test_an_optimizer_made_before_to_empty_is_refused():
    from accel_parallel import NativeEngine

    with torch.device("meta"):
        model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = NativeEngine(Plan([single()]), PlanContext(device=torch.device("cpu")))
    engine.prepare_model(model.to_empty(device="cpu"))
    with pytest.raises(PlanError, match="made before to_empty"):
        engine.prepare_optimizer(optimizer)


def test_gradients_stay_whole_and_local_until_the_window_ends(ranks):
    def body():
        from accel_parallel import Accumulation, GradientAccumulationPlugin, Plan, PlanContext, fully_shard_blocks
        from accel_state import GradientState, PartialState

        state = PartialState(cpu=True)
        model = nn.Linear(1, 2, bias=False)
        Plan([fully_shard_blocks(None)]).apply(model, PlanContext(device=state.device, world_size=2))
        accumulation = Accumulation(GradientState(GradientAccumulationPlugin(num_steps=2)))
        seen = []
        for step in range(2):
            with accumulation.block((model,)):
                model(torch.full((1, 1), 1.0 + state.process_index + step)).sum().backward()
            seen.append(model.weight.grad is not None)
        return seen, model.weight.grad.full_tensor().flatten().tolist()

    assert ranks(body, 2) == [([False, True], [4.0, 4.0])] * 2


def test_what_cannot_be_sharded_is_refused_before_anything_changes(ranks):
    def body():
        from accel_parallel import Plan, PlanContext, fully_shard_blocks
        from accel_state import PartialState

        context = PlanContext(device=PartialState(cpu=True).device, world_size=2)
        answers = []
        shared = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        shared[1].weight = shared[0].weight
        mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
        bare = nn.ModuleList([nn.Linear(2, 2)])
        for model, wrap in ((shared, ["0", "1"]), (mixed, None), (mixed, ["nowhere.*"]), (bare, None)):
            try:
                Plan([fully_shard_blocks(wrap)]).apply(model, context)
            except ValueError as error:
                answers.append(str(error))
            assert all(type(p) is nn.Parameter for p in model.parameters())
        return answers

    for first, second, third, fourth in ranks(body, 2):
        assert "a ModuleList has no forward" in fourth
        assert "1.weight is shared between modules of different units" in first
        assert "several dtypes" in second
        assert "no module of the model is named like 'nowhere.*'" in third


def test_precision_offload_and_ignored_modules(ranks):
    def body():
        from torch.distributed.fsdp import MixedPrecisionPolicy

        from accel_parallel import Plan, PlanContext, fully_shard_blocks
        from accel_state import PartialState

        context = PlanContext(device=PartialState(cpu=True).device, world_size=2)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        kept = model[1].weight
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        step = fully_shard_blocks(["0"], mixed_precision=policy, ignored=[model[1]])
        Plan([step]).apply(model, context)
        seen = []
        model[0].register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
        model[0](torch.ones(1, 2))
        return seen, model[1].weight is kept, type(model[0].weight).__name__

    assert ranks(body, 2) == [([torch.bfloat16], True, "DTensor")] * 2
