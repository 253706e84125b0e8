"""FSDP version 1 in checkpoints: names of the model's own, and state that comes back."""

import pytest
import torch
from torch import nn

from accel_parallel import write_back
from accel_state.errors import PlanError

MARKS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_flat_param", "module.")


def prepared(use_orig_params, *, others=()):
    """On a rank: a trained model with all wrappers that change names, its optimizer and the engine."""
    from accel_parallel import (
        FullyShardedDataParallelPlugin,
        NativeEngine,
        Plan,
        PlanContext,
        Prepared,
        activation_checkpointing,
        compile_model,
        fsdp1,
    )
    from accel_state import GradientState, PartialState
    from accel_testkit.nets import next_token_loss
    from accel_testkit.training import tied_net, tokens

    state = PartialState(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1, auto_wrap_policy="TRANSFORMER_BASED_WRAP", use_orig_params=use_orig_params
    )
    plan = Plan([activation_checkpointing(), fsdp1(plugin), compile_model(backend="eager")])
    context = PlanContext(device=state.device, world_size=state.num_processes)
    engine = NativeEngine(plan, context, gradient_state=GradientState())
    model = tied_net()
    model.blocks[0].register_buffer("seen", torch.ones(2))
    ready = engine.prepare(Prepared(models=(model,)))
    trained = [*ready.models[0].parameters(), *others]
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(trained, lr=0.01))
    batch = tokens(1)[0]
    engine.backward(next_token_loss(ready.models[0](batch), batch))
    optimizer.step()
    optimizer.zero_grad()
    return engine, Prepared(models=ready.models, optimizers=(optimizer,)), model


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def names_and_values(use_orig_params):
    from accel_testkit.training import tied_net

    engine, objects, bare = prepared(use_orig_params)
    state = engine.state(objects)
    model, optimizer = state["TinyTransformer-0"], state["AdamW-0"]
    want = [*tied_net().state_dict(), "blocks.0.seen"]
    assert sorted(model.state_dict()) == sorted(want)
    assert not [prefix for prefix in model.state_dict()._metadata if any(mark in f"{prefix}." for mark in MARKS)]
    assert model.state_dict()["logits.weight"] is model.state_dict()["embedding.weight"]
    assert model.stands_for is bare and model.model_class is type(bare)
    assert [name for name, _ in model.named_buffers()] == ["blocks.0.seen"]
    parameters = dict(model.named_parameters())
    assert parameters.keys() == dict(tied_net().named_parameters()).keys()
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(map(id, parameters.values()))

    before = {name: whole(value).clone() for name, value in model.state_dict().items()}
    numbers = optimizer.state_dict()["state"]
    moments = {number: whole(fields["exp_avg"]).clone() for number, fields in numbers.items()}
    write_back(state.values())  # nothing was loaded: nothing changes
    with torch.no_grad():
        for value in {id(v): v for v in model.state_dict().values()}.values():
            value.mul_(0.5)
        for fields in numbers.values():
            fields["exp_avg"].mul_(2.0)
    model.load_state_dict({"norm.weight": model.state_dict()["norm.weight"], "unknown": torch.ones(1)})
    optimizer.load_state_dict(optimizer.state_dict())
    write_back(state.values())
    again = engine.state(objects)
    for name, value in again["TinyTransformer-0"].state_dict().items():
        assert torch.equal(whole(value), before[name] / 2), name
    for number, fields in again["AdamW-0"].state_dict()["state"].items():
        assert torch.equal(whole(fields["exp_avg"]), moments[number] * 2)
        assert fields["step"] == 1


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_checkpoint_has_the_models_own_names(ranks, use_orig_params):
    ranks(names_and_values, 2, use_orig_params)


def with_another_parameter():
    engine, objects, _ = prepared(True, others=[nn.Parameter(torch.ones(1))])
    with pytest.raises(PlanError, match=r"a AdamW that trains a model under FSDP version 1 and 1 other parameters"):
        engine.state(objects)


def test_an_optimizer_of_more_than_the_model_is_refused(ranks):
    ranks(with_another_parameter, 2)
