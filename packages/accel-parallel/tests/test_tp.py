import pytest
import torch
from torch import nn

from accel_parallel import Plan, PlanContext, tensor_parallel
from accel_parallel.tp_styles import complaints, resolve_plan
from accel_state.errors import PlanError
from accel_testkit.nets import TP_PLAN, TP_SEQUENCE_PLAN, TinyTransformer
from accel_testkit.training import single_truth, tied_net, tokens, train


@pytest.mark.parametrize(
    ("sizes", "plan", "n"),
    [
        ({"tp_size": 2}, TP_PLAN, 2),
        ({"tp_size": 2}, TP_SEQUENCE_PLAN, 2),
        ({"tp_size": 4}, TP_PLAN, 4),
        ({"dp_shard_size": 2, "tp_size": 2}, TP_PLAN, 4),
        ({"dp_shard_size": 2, "tp_size": 2}, TP_SEQUENCE_PLAN, 4),
        ({"dp_replicate_size": 2, "tp_size": 2}, TP_PLAN, 4),
    ],
)
def test_it_equals_one_device(ranks, sizes, plan, n):
    def body(sizes, plan):
        from accel_parallel import (
            NativeEngine,
            ParallelismConfig,
            Plan,
            PlanContext,
            Prepared,
            full_state_dict,
            fully_shard_blocks,
            single,
            tensor_parallel,
        )  # fmt: skip
        from accel_state import GradientState, PartialState

        state = PartialState(cpu=True)
        config = ParallelismConfig(**sizes)
        context = PlanContext(device=state.device, world_size=n, mesh=config.build_device_mesh("cpu"))
        parts = config.data_parallel_size
        steps = [tensor_parallel(plan), fully_shard_blocks()] if parts > 1 else [single(), tensor_parallel(plan)]
        model = tied_net()
        if state.process_index % sizes["tp_size"]:
            for norm in (model.norm, model.blocks[0].norm1):
                nn.init.constant_(norm.weight, 5.0)  # the first rank of each tp group decides
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        engine = NativeEngine(Plan(steps), context, gradient_state=GradientState())
        ready = engine.prepare(Prepared(models=(model,), optimizers=(optimizer,)))
        (model,), (optimizer,) = ready.models, ready.optimizers
        assert engine.prepare_model(model) is model
        assert model.logits.weight is model.embedding.weight
        assert model.blocks[0].up.weight.to_local().shape[0] * sizes["tp_size"] <= 128
        mine = [batch.chunk(parts)[state.process_index // sizes["tp_size"]] for batch in tokens()]
        return train(model, optimizer, mine, engine.clip_grad_norm_), full_state_dict(model)

    want_norms, want = single_truth()
    got = ranks(body, n, sizes, plan)
    for norms, _ in got:
        assert norms == pytest.approx(want_norms, rel=1e-5)
    for name, value in want.items():
        assert (got[0][1][name] - value).abs().max() < 1e-6, name


def test_a_models_own_plan_and_functions():
    model = TinyTransformer()
    with pytest.raises(PlanError, match="TinyTransformer has no tp_plan of its own"):
        resolve_plan(model, None)
    model._tp_plan = {"blocks.*.up": "colwise", "norm": "replicate"}
    assert list(resolve_plan(model, None)) == ["blocks.0.up", "blocks.1.up"]
    assert list(resolve_plan(model, lambda _model: {"logits": "colwise"})) == ["logits"]


@pytest.mark.parametrize(
    ("plan", "ranks", "reason"),
    [
        (TP_PLAN, 3, "heads=4 of blocks.0 cannot be dealt to 3 ranks"),
        ({"blocks.*.up": "colwise"}, 3, "blocks.0.up.weight has 128 entries along dimension 0, which 3 ranks"),
        ({"logits": "colwise"}, 2, "embedding.weight and logits.weight are one parameter"),
        ({"logits": "colwise", "embedding": "colwise"}, 2, "would be shared differently"),
    ],
)
def test_what_cannot_be_shared_is_named(plan, ranks, reason):
    model = TinyTransformer()
    assert reason in " ".join(complaints(model, resolve_plan(model, plan), ranks))


def test_heads_of_a_configuration_count_too():
    class Config:
        num_attention_heads, num_key_value_heads = 4, 1

    model = TinyTransformer()
    model.config = Config()
    (complaint,) = complaints(model, {}, 2)
    assert "num_key_value_heads=1 of the model's config cannot be dealt to 2 ranks" in complaint
    assert not complaints(TinyTransformer(), resolve_plan(model, TP_PLAN), 2)


def test_words_and_names_that_do_not_exist():
    model = TinyTransformer()
    with pytest.raises(PlanError, match=r"no module of the model is named like 'blocks\.9'"):
        resolve_plan(model, {"blocks.9": "colwise"})
    with pytest.raises(PlanError, match="'sideways', which does not exist: use colwise"):
        resolve_plan(model, {"norm": "sideways"})


def test_without_an_axis_it_is_refused():
    with pytest.raises(PlanError, match="no axis 'tp' in the mesh"):
        Plan([tensor_parallel(TP_PLAN)]).apply(tied_net(), PlanContext(device=torch.device("cpu")))
