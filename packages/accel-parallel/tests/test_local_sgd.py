import pytest
import torch
from torch import nn

from accel_parallel import LocalSGD
from accel_state.errors import PlanError, SettingError


def body(steps, updates, wrapped, enabled=True):
    from accel_parallel import LocalSGD, Plan, PlanContext, ddp, single
    from accel_state import PartialState

    state = PartialState(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    if wrapped:
        context = PlanContext(device=state.device, world_size=2)
        model = Plan([single(), ddp()]).apply(model, context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = []
    with LocalSGD(None, model, steps, enabled) as local:
        for update in range(updates):
            torch.manual_seed(10 * update + state.process_index)
            model(torch.randn(4, 2)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            history.append(next(model.parameters()).detach().clone())
    final = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    return history, final


@pytest.mark.parametrize("wrapped", [False, True])
def test_ranks_part_and_meet(ranks, wrapped):
    (first, end), (second, other_end) = ranks(body, 2, 2, 5, wrapped)
    same = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    assert same == [False, True, False, True, False]
    assert all(torch.equal(a, b) for a, b in zip(end, other_end, strict=True))  # a last mean at the block's end


def test_a_mean_after_each_update_is_data_parallel(ranks):
    def by_hand():
        from accel_state import PartialState

        state = PartialState(cpu=True)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for update in range(3):
            torch.manual_seed(10 * update + state.process_index)
            model(torch.randn(4, 2)).pow(2).sum().backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= 2
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    want, (_, got) = ranks(by_hand, 2)[0], ranks(body, 2, 1, 3, False)[0]
    for a, b in zip(want, got, strict=False):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_disabled_it_leaves_ddp_alone(ranks):
    (first, _), (second, _) = ranks(body, 2, 2, 3, True, False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_alone_there_is_nothing_to_do():
    model = nn.Linear(1, 1)
    before = model.weight.clone()
    with LocalSGD(None, model, 1) as local:
        local.step()
    assert torch.equal(model.weight, before) and not local.enabled


def test_micro_batches_are_no_updates():
    from types import SimpleNamespace

    state = SimpleNamespace(sync_gradients=False)
    local = LocalSGD(SimpleNamespace(num_processes=2, gradient_state=state), nn.Linear(1, 1), 8)
    local.step()
    state.sync_gradients = True
    local.step()
    assert local.num_steps == 1


def test_what_cannot_be_is_said(ranks):
    for steps in (0, True, 1.5):
        with pytest.raises(SettingError, match="local_sgd_steps"):
            LocalSGD(None, nn.Linear(1, 1), steps)

    def sharded():
        from accel_parallel import Plan, PlanContext, fully_shard_blocks
        from accel_state import PartialState

        state = PartialState(cpu=True)
        context = PlanContext(device=state.device, world_size=1)
        model = Plan([fully_shard_blocks(None)]).apply(nn.Linear(1, 1), context)
        with pytest.raises(PlanError, match="no rank has a model to train alone"):
            LocalSGD(None, model, 1)
        LocalSGD(None, model, 1, enabled=False)
        return True

    assert ranks(sharded, 1) == [True]
