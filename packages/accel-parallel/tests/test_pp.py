"""Pipelines against one device, and what is said of models that cannot be cut."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accel_parallel import PipelineConfig, Plan, PlanContext, pipelined
from accel_parallel.pipeline.cutting import balanced_runs, chain_of, cut_chain, require_known_names
from accel_parallel.pipeline.model import PipelinedModel
from accel_state.errors import PlanError, SettingError
from accel_testkit.nets import TinyTransformer, chain_net
from accel_testkit.training import tokens


def loss_of(logits, batch):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def sum_of(logits, batch):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")


def truth(updates=3, accumulation=1):
    model = chain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for batch in tokens(updates):
        for part in batch.chunk(accumulation):
            (loss_of(model(part), part) / accumulation).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.clone() for name, value in model.state_dict().items()}


def piped(sizes, options, *, accumulation=1, with_items=False, shards=False):
    """On a rank: the same training through a pipeline; norms, losses and this rank's whole values."""
    from accel_parallel import (
        Accumulation,
        NativeEngine,
        ParallelismConfig,
        Prepared,
        fully_shard_blocks,
        single,
    )
    from accel_state import GradientState, PartialState

    state = PartialState(cpu=True)
    config = ParallelismConfig(**sizes)
    mesh = config.build_device_mesh("cpu")
    context = PlanContext(device=state.device, world_size=state.num_processes, mesh=mesh)
    steps = [pipelined(PipelineConfig(**options)), single()]
    steps += [fully_shard_blocks()] if shards else []
    gradients = GradientState()
    gradients.plugin_kwargs["num_steps"] = accumulation
    engine = NativeEngine(Plan(steps), context, gradient_state=gradients)
    model = chain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ready = engine.prepare(Prepared(models=(model,), optimizers=(optimizer,)))
    (model,), (optimizer,) = ready.models, ready.optimizers
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    accumulate = Accumulation(gradients)  # its block has to be the same one in every micro-step
    part = 0 if config.data_parallel_size == 1 else mesh["dp"].get_local_rank()
    norms, losses = [], []
    for batch in tokens(3):
        mine = batch.chunk(config.data_parallel_size)[part]
        for micro in mine.chunk(accumulation):
            with accumulate.block((model,)):
                function, items = (sum_of, micro[:, 1:].numel()) if with_items else (loss_of, None)
                losses.append(engine.forward_backward(model, (micro,), {}, micro, function, items))
        norms.append(engine.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    whole = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in model.state_dict().items()}
    assert model.has_last == (losses[0] is not None)
    if options.get("schedule") == "zbv_zero_bubble":
        with pytest.raises(PlanError, match="cannot run forward alone"):
            model(tokens(1)[0])
    else:
        output = model(tokens(1)[0])
        assert (output is None) != model.has_last
    return norms, [None if loss is None else float(loss) for loss in losses], whole


CASES = [
    ({"pp_size": 2}, {"schedule": "gpipe"}, 2, {}),
    ({"pp_size": 2}, {}, 2, {"accumulation": 2}),
    ({"pp_size": 2}, {"num_microbatches": 4}, 2, {"with_items": True, "accumulation": 2}),
    ({"pp_size": 2}, {"schedule": "interleaved_1f1b"}, 2, {}),
    ({"pp_size": 2}, {"schedule": "interleaved_zero_bubble"}, 2, {}),
    ({"pp_size": 2}, {"schedule": "zbv_zero_bubble", "num_microbatches": 4}, 2, {}),
    ({"pp_size": 2, "dp_replicate_size": 2}, {}, 4, {"accumulation": 2}),
    ({"pp_size": 2, "dp_shard_size": 2}, {}, 4, {"shards": True, "accumulation": 2}),
]


@pytest.mark.parametrize(("sizes", "options", "n", "more"), CASES)
def test_it_equals_one_device(ranks, sizes, options, n, more):
    def body(sizes, options, more):
        return piped(sizes, options, **more)

    want_norms, want = truth()
    results = ranks(body, n, sizes, options, more)
    seen = set()
    for norms, _, whole in results:
        assert norms == pytest.approx(want_norms, rel=1e-5)
        seen |= set(whole)
        for name, value in whole.items():
            assert (value - want[name]).abs().max() < 2e-6, name
    assert seen == set(want)


def test_a_traced_model_equals_one_device(ranks):
    def body():
        from accel_parallel import NativeEngine, ParallelismConfig, Prepared, single
        from accel_state import PartialState

        state = PartialState(cpu=True)
        mesh = ParallelismConfig(pp_size=2).build_device_mesh("cpu")
        torch.manual_seed(0)
        model = TinyTransformer()
        model.logits.weight = nn.Parameter(model.logits.weight.detach().clone())  # untied
        twin = TinyTransformer()
        twin.logits.weight = nn.Parameter(twin.logits.weight.detach().clone())
        twin.load_state_dict(model.state_dict())
        batch = tokens(1)[0]
        config = PipelineConfig(example=(batch[:4],), cuts=["blocks.1"])
        context = PlanContext(device=state.device, world_size=2, mesh=mesh)
        engine = NativeEngine(Plan([pipelined(config), single()]), context)
        (model,) = engine.prepare(Prepared(models=(model,))).models
        loss = engine.forward_backward(model, (batch,), {}, batch, loss_of)
        want = loss_of(twin(batch), batch)
        want.backward()
        if loss is not None:
            assert float(loss) == pytest.approx(float(want), rel=1e-5)
        expected = dict(twin.named_parameters())
        for name, parameter in model.named_parameters():
            assert (parameter.grad - expected[name].grad).abs().max() < 1e-6, name
        return sorted(name for name, _ in model.named_parameters()), sorted(expected)

    (first, names), (second, _) = ranks(body, 2)
    assert sorted(first + second) == names


class Backwards(nn.Module):
    """Registers its tied output before its input, which it calls first; with a module that has a version."""

    def __init__(self):
        super().__init__()
        self.logits, self.norm, self.embedding = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(4), nn.Embedding(8, 4)
        self.logits.weight = self.embedding.weight


def test_a_part_has_the_names_and_the_order_of_the_whole():
    whole = Backwards()
    (stage,) = cut_chain(whole, PipelineConfig(layers=["embedding", "norm", "logits"]), 1, [0])
    stage.register_buffer("lifted", torch.ones(1))  # as tracing may add
    part = PipelinedModel({0: stage}, 1, PipelineConfig(), torch.device("cpu"), None, Backwards, whole.state_dict())
    assert [name for name, _ in part.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert next(name for name, _ in part.named_parameters("m")) == "m.logits.weight"
    both = [name for name, _ in part.named_parameters(remove_duplicate=False)]
    assert both == [name for name, _ in whole.named_parameters(remove_duplicate=False)]
    state = part.state_dict()
    assert list(state) == list(whole.state_dict())
    assert state._metadata["norm"] == {"version": 2}
    del state["norm.num_batches_tracked"]
    with pytest.raises(PlanError, match=r"the state lacks norm\.num_batches_tracked"):
        part.load_state_dict(state)
    state["norm.running_mean"] = torch.full((4,), 5.0)
    assert part.load_state_dict({**state, "elsewhere.weight": 0}, strict=False).missing_keys == [
        "norm.num_batches_tracked"
    ]
    assert torch.equal(whole.norm.running_mean, state["norm.running_mean"])


def test_runs_are_balanced_and_none_is_empty():
    assert balanced_runs([5, 1, 1, 1, 5], 3) == [range(1), range(1, 4), range(4, 5)]
    assert balanced_runs([1, 1, 1, 9], 3) == [range(2), range(2, 3), range(3, 4)]
    assert balanced_runs([9, 1, 1, 1], 4) == [range(i, i + 1) for i in range(4)]
    for sizes in ([3, 1, 4, 1, 5, 9, 2, 6], [1] * 7, [10, 1, 1, 1, 1, 1]):
        for count in range(1, len(sizes) + 1):
            runs = balanced_runs(sizes, count)
            assert len(runs) == count
            assert [i for run in runs for i in run] == list(range(len(sizes)))
            assert all(len(run) for run in runs)


def test_what_cannot_be_cut_is_said():
    with pytest.raises(PlanError, match="nothing says how to cut a TinyTransformer"):
        chain_of(TinyTransformer(), PipelineConfig())
    with pytest.raises(PlanError, match=r"no module of the model is named like 'layers\.\*'"):
        chain_of(TinyTransformer(), PipelineConfig(layers=["layers.*"]))
    with pytest.raises(PlanError, match=r"position\.weight belong to no module in `layers`"):
        chain_of(TinyTransformer(), PipelineConfig(layers=["embedding", "blocks.*", "norm", "logits"]))
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(PlanError, match="chain of 2 layers, fewer than the 3 stages"):
        cut_chain(two, PipelineConfig(), 3, ())
    two[1].weight = two[0].weight
    with pytest.raises(PlanError, match=r"0\.weight \(stage 0\) and 1\.weight \(stage 1\): a parameter that is shared"):
        cut_chain(two, PipelineConfig(), 2, ())
    three = nn.Sequential(nn.Linear(2, 2), two)
    cut_chain(three, PipelineConfig(), 2, ())
    with pytest.raises(
        PlanError, match=r"1\.0\.weight and 1\.1\.weight are one parameter.*use schedule='interleaved_1f1b'"
    ):
        cut_chain(three, PipelineConfig(schedule="zbv_zero_bubble"), 2, ())
    require_known_names([two], ["0.weight", "0.bias", "1.bias"])
    with pytest.raises(PlanError, match=r"parameters that the model does not: 1\.bias"):
        require_known_names([two], ["0.weight", "0.bias"])
    with pytest.raises(PlanError, match="no axis 'pp' in the mesh"):
        Plan([pipelined()]).apply(two, PlanContext(device=torch.device("cpu")))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "2f2b"}, "use one of gpipe, 1f1b"),
        ({"num_microbatches": 0}, "at least 1"),
        ({"stages_per_rank": 2}, "does not fit schedule='1f1b', which has 1"),
        ({"schedule": "zbv_zero_bubble", "stages_per_rank": 3}, "which has 2"),
        ({"schedule": "interleaved_1f1b", "stages_per_rank": 1}, "which has 2 or more"),
        ({"cuts": ["a"]}, "needs both"),
        ({"layers": ["a"], "make_stage": lambda model, index, count: model}, "give one of them"),
    ],
)
def test_options_that_contradict_each_other(options, said):
    with pytest.raises(SettingError, match=said):
        PipelineConfig(**options)
