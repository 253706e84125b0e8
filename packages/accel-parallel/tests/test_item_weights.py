import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accel_parallel import Accumulation, GradientAccumulationPlugin, NativeEngine, Plan, PlanContext, Prepared, single
from accel_state import GradientState
from accel_state.errors import PlanError, SettingError
from accel_testkit.nets import TP_PLAN
from accel_testkit.training import tied_net

WINDOWS = 3


def micro_batches(data_rank: int):
    """Windows of 2, 2 and 1 micro-batches of unequal lengths, for each of two data ranks."""
    generator = torch.Generator().manual_seed(5)
    windows = []
    for count in (2, 2, 1):
        rows = [[torch.randint(0, 64, (2, 16), generator=generator) for _ in range(count)] for _ in range(2)]
        for rank, micro in enumerate(rows):
            for index, batch in enumerate(micro):
                batch[0, 3 + rank + 5 * index :] = 0  # 0 is padding, which has no loss
        windows.append(rows[data_rank])
    return windows


def summed(model, batch):
    targets = batch[:, 1:].flatten()
    loss = F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), targets, ignore_index=0, reduction="sum")
    return loss, targets.ne(0).sum()


def truth():
    """One device, each window as one big batch; the norms before clipping and the weights."""
    model = tied_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for windows in zip(micro_batches(0), micro_batches(1), strict=True):
        loss, items = summed(model, torch.cat([batch for rows in windows for batch in rows]))
        (loss / items).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.clone() for name, value in model.state_dict().items()}


def train_here(strategy: str, sizes: dict, options: dict):
    """The body of the ranks: the same windows by a strategy. Of four data ranks two see the same data."""
    from torch.amp import GradScaler

    from accel_parallel import (
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        ddp,
        fsdp1,
        full_state_dict,
        fully_shard_blocks,
        tensor_parallel,
    )
    from accel_state import PartialState

    state = PartialState(cpu=True)
    config = ParallelismConfig(**sizes) if sizes else None
    mesh = None if config is None else config.build_device_mesh("cpu")
    context = PlanContext(device=state.device, world_size=state.num_processes, mesh=mesh)
    steps = {
        "single": [single()],
        "ddp": [single(), ddp()],
        "fsdp1": [fsdp1(FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True))],
        "fsdp2": [fully_shard_blocks()],
        "tp": [single(), tensor_parallel(TP_PLAN)],
        "fsdp2+tp": [tensor_parallel(TP_PLAN), fully_shard_blocks()],
    }[strategy]
    scaler = GradScaler("cpu", init_scale=8.0) if options.pop("scaled", False) else None
    gradient_state = GradientState(GradientAccumulationPlugin(num_steps=2, **options))
    engine = NativeEngine(Plan(steps), context, gradient_state=gradient_state, scaler=scaler)
    model = tied_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ready = engine.prepare(Prepared(models=(model,), optimizers=(optimizer,)))
    (model,), (optimizer,) = ready.models, ready.optimizers
    accumulation = Accumulation(gradient_state)
    data_ranks = 1 if strategy in ("single", "tp") else 2
    both = [a + b for a, b in zip(micro_batches(0), micro_batches(1), strict=True)]  # one rank has all of them
    mine = both if data_ranks == 1 else micro_batches(state.process_index // (state.num_processes // 2))
    norms = []
    for window in mine:
        gradient_state.plugin_kwargs["num_steps"] = len(window)  # as the loader's end would cut it
        for batch in window:
            with accumulation.block((model,)):
                loss, items = summed(model, batch)
                engine.backward(loss, num_items=items if state.process_index else items.item())
                norm = engine.clip_grad_norm_(model.parameters(), 0.5)
                if gradient_state.sync_gradients:
                    norms.append(norm.item())
                optimizer.step()
                optimizer.zero_grad()
    return norms, full_state_dict(model)


@pytest.mark.parametrize(
    ("strategy", "n", "sizes", "options"),
    [
        ("single", 1, {}, {}),
        ("single", 1, {}, {"scaled": True}),
        ("ddp", 2, {}, {}),
        ("ddp", 2, {}, {"scaled": True, "sync_each_batch": True}),
        ("fsdp1", 2, {}, {}),
        ("fsdp2", 2, {}, {}),
        ("fsdp2", 2, {}, {"scaled": True, "sync_each_batch": True}),
        ("fsdp2", 4, {"dp_replicate_size": 2, "dp_shard_size": 2}, {}),
        ("tp", 2, {"tp_size": 2}, {}),
        ("fsdp2+tp", 4, {"dp_shard_size": 2, "tp_size": 2}, {}),
    ],
)
def test_windows_equal_one_big_batch(ranks, strategy, n, sizes, options):
    want_norms, want = truth()
    got = ranks(train_here, n, strategy, sizes, options)
    for norms, _ in got:
        assert norms == pytest.approx(want_norms, rel=1e-5)
    for name, value in want.items():
        assert (got[0][1][name] - value).abs().max() < 1e-6, name


def refused_with_ignored(version: int):
    from accel_parallel import FullyShardedDataParallelPlugin, fsdp1, fully_shard_blocks
    from accel_state import PartialState

    state = PartialState(cpu=True)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True, ignored_modules="0")
    step = fsdp1(plugin) if version == 1 else fully_shard_blocks(None, ignored=[model[0]])
    context = PlanContext(device=state.device, world_size=state.num_processes)
    engine = NativeEngine(Plan([step]), context, gradient_state=GradientState(GradientAccumulationPlugin(num_steps=1)))
    (prepared,) = engine.prepare(Prepared(models=(model,))).models
    with pytest.raises(PlanError, match=r"a Linear that FSDP ignores: gradients of weight, bias are not reduced"):
        engine.backward(prepared(torch.ones(1, 2)).sum(), num_items=1)
    engine.backward(prepared(torch.ones(1, 2)).sum())
    model[0].requires_grad_(False)
    engine.backward(prepared(torch.ones(1, 2)).sum(), num_items=1)


@pytest.mark.parametrize("version", [1, 2])
def test_sums_do_not_go_with_gradients_that_are_not_reduced(ranks, version):
    ranks(refused_with_ignored, 2, version)


def alone(num_steps: int = 2, **options):
    state = GradientState(GradientAccumulationPlugin(num_steps=num_steps))
    engine = NativeEngine(Plan([single()]), PlanContext(device=torch.device("cpu")), gradient_state=state, **options)
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    engine.prepare(Prepared(models=tuple(models)))
    return engine, Accumulation(state), models


def test_each_block_of_models_has_a_window_of_its_own():
    engine, accumulation, (a, b) = alone()
    x = torch.ones(1, 1)
    for items_a, items_b in ((1, 3), (3, 5)):
        with accumulation.block((a,)):
            engine.backward(a(x * 2 * items_a).sum(), num_items=items_a)
        with accumulation.block((b,)):
            engine.backward(b(x * 6 * items_b).sum(), num_items=items_b)
            if items_b == 3:
                assert b.weight.grad.item() == 18  # sums, until the window ends
    assert (a.weight.grad.item(), b.weight.grad.item()) == (2, 6)


def test_outside_of_blocks_each_backward_is_a_window():
    engine, _, (a, _) = alone()
    for items in (2, 4):
        engine.backward((a(torch.ones(1, 1)) * items).sum(), num_items=items)
    assert a.weight.grad.item() == 2
    engine.gradient_state.sync_gradients = False  # a loop that says itself when a window ends
    a.zero_grad()
    engine.backward(a(torch.ones(1, 1)).sum(), num_items=1)
    engine.gradient_state.sync_gradients = True
    engine.backward(a(torch.full((3, 1), 3.0)).sum(), num_items=3)
    assert a.weight.grad.item() == (1 + 9) / 4
    engine.backward(a(torch.ones(1, 1)).mean())  # the next may be another kind


def test_an_empty_window_leaves_zeros():
    engine, accumulation, (a, _) = alone()
    for _ in range(2):
        with accumulation.block((a,)):
            engine.backward(a(torch.empty(0, 1)).sum(), num_items=torch.tensor(0))
    assert a.weight.grad.item() == 0
    a.zero_grad()
    for items in (0, 2):  # an empty micro-batch is fine in any window
        with accumulation.block((a,)):
            engine.backward(a(torch.ones(items, 1)).sum(), num_items=items)
    assert a.weight.grad.item() == 1


@pytest.mark.parametrize("first", [None, 1])
def test_sums_and_means_do_not_mix_in_a_window(first):
    engine, accumulation, (a, _) = alone()
    with accumulation.block((a,)):
        engine.backward(a(torch.ones(1, 1)).sum(), num_items=first)
    with (
        accumulation.block((a,)),
        pytest.raises(PlanError, match=r"in an accumulation window that began with.*scaled differently"),
    ):
        engine.backward(a(torch.ones(1, 1)).sum(), num_items=1 if first is None else None)
    with accumulation.block((a,)):
        engine.backward(a(torch.ones(1, 1)).sum(), num_items=1 if first is None else None)  # a new window


def test_items_are_not_counted_twice_in_one_micro_step():
    engine, accumulation, (a, b) = alone()
    with accumulation.block((a, b)):
        engine.backward(a(torch.ones(1, 1)).sum(), num_items=1)
        with pytest.raises(PlanError, match="would count its items twice: add the losses"):
            engine.backward(b(torch.ones(1, 1)).sum(), num_items=1)


@pytest.mark.parametrize("items", [-1, True, "3", float("nan"), torch.ones(2)])
def test_a_count_is_one_number_from_0(items):
    engine, _, (a, _) = alone()
    with pytest.raises(SettingError, match="num_items"):
        engine.backward(a(torch.ones(1, 1)).sum(), num_items=items)


def test_sparse_gradients_and_half_precision_are_scaled_too():
    from accel_parallel.item_weights import scale_gradients

    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    half = nn.Linear(1, 1, bias=False).bfloat16()
    half(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    scale_gradients([table, half, table], torch.tensor(0.5))
    assert table.weight.grad.to_dense()[1].tolist() == [1, 1]
    assert half.weight.grad.item() == 0.5 and half.weight.grad.dtype is torch.bfloat16
