import pytest
import torch
from torch import nn

from accel_parallel import (
    DynamoBackend,
    Plan,
    PlanContext,
    TorchDynamoPlugin,
    activation_checkpointing,
    compile_blocks,
    compile_model,
    compile_regions,
    compile_regions_deepspeed,
    compile_regions_fsdp2,
    compiling_of,
    extract_model_from_parallel,
    has_compiled_regions,
    inner_model,
    is_compiled_module,
    single,
)
from accel_parallel.steps.activation_checkpointing import is_checkpointed
from accel_state.errors import PlanError, SettingError
from accel_testkit.nets import next_token_loss
from accel_testkit.training import single_truth, tied_net, tokens, train

CPU = PlanContext(device=torch.device("cpu"))
pytestmark = pytest.mark.filterwarnings(  # torch's compiler hides it, and fails where warnings are errors
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)


def test_the_plugin_has_the_peers_fields(monkeypatch):
    plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.NO and plugin.to_kwargs() == {} and not plugin.compiles
    assert plugin.to_dict() == {
        "backend": "no",
        "mode": "default",
        "fullgraph": False,
        "dynamic": None,
        "options": None,
        "disable": False,
        "use_regional_compilation": False,
    }
    assert TorchDynamoPlugin(backend="aot_eager", mode="default").to_kwargs() == {"backend": "aot_eager"}
    assert compiling_of(plugin) is None
    with pytest.raises(SettingError, match="dynamo backend 'foo' does not exist: use one of NO, EAGER"):
        TorchDynamoPlugin(backend="foo")

    variables = {"BACKEND": "eager", "MODE": "reduce-overhead", "USE_FULLGRAPH": "1", "USE_DYNAMIC": "0"}
    for name, value in (*variables.items(), ("USE_REGIONAL_COMPILATION", "true")):
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    assert TorchDynamoPlugin() == TorchDynamoPlugin("eager", "reduce-overhead", True, False, None, False, True)
    assert TorchDynamoPlugin().to_kwargs() == {
        "backend": "eager",
        "mode": "reduce-overhead",
        "fullgraph": True,
        "dynamic": False,
    }
    assert TorchDynamoPlugin(mode="default", fullgraph=False, use_regional_compilation=False).mode == "default"


def test_the_whole_model_keeps_its_names():
    plan = Plan([single(), compile_model(backend="eager")])
    bare = tied_net()
    names = list(bare.state_dict())
    model = plan.apply(bare, CPU)
    assert plan.apply(model, CPU) is model
    assert is_compiled_module(model) and has_compiled_regions(model)
    assert sorted(model.state_dict()) == sorted(names)
    assert extract_model_from_parallel(model) is model
    assert extract_model_from_parallel(model, keep_torch_compile=False) is bare
    other = tied_net()
    nn.init.zeros_(other.norm.weight)
    model.load_state_dict(other.state_dict())
    assert not bare.norm.weight.any()
    model.load_state_dict({f"_orig_mod.{name}": value for name, value in tied_net().state_dict().items()})
    assert bare.norm.weight.all()
    assert "compiled as a whole by eager" in plan.explain(bare, CPU)


def test_one_block_is_compiled_for_all():
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    want, model = tied_net(), tied_net()
    plan = Plan([single(), compile_blocks(backend=backend, fullgraph=True)])
    assert plan.apply(plan.apply(model, CPU), CPU) is model
    assert has_compiled_regions(model) and not is_compiled_module(model) and not has_compiled_regions(want)
    assert list(model.state_dict()) == list(want.state_dict())
    for net in (want, model):
        next_token_loss(net(tokens()[0]), tokens()[0]).backward()
    assert len(graphs) == 1
    for a, b in zip(want.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert "2 blocks compiled by" in plan.explain(model, CPU)
    assert Plan([single(), compile_model(backend="eager")]).apply(model, CPU) is model


@pytest.mark.parametrize("checkpointed", [False, True])
def test_unwrapped_blocks_run_as_they_were_written(checkpointed):
    calls = []

    def backend(graph, _inputs):
        calls.append(graph)
        return graph.forward

    model = tied_net()
    steps = [single(), *([activation_checkpointing()] if checkpointed else []), compile_blocks(backend=backend)]
    Plan(steps).apply(model, CPU)
    assert extract_model_from_parallel(model) is model and inner_model(model) is model
    plain = extract_model_from_parallel(model, keep_torch_compile=False)
    assert type(plain) is type(model) and not has_compiled_regions(plain)
    assert torch.equal(plain(tokens()[0]), tied_net()(tokens()[0])) and not calls
    assert [is_checkpointed(block) for block in plain.blocks] == [checkpointed] * 2
    assert dict(plain.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(a is b for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert has_compiled_regions(model) and len(model(tokens()[0])) == 8 and calls


def test_checkpointed_blocks_are_compiled_with_it():
    model = tied_net()
    plan = Plan([single(), activation_checkpointing(), compile_blocks(backend="aot_eager")])
    before = [block.forward for block in plan.apply(model, CPU).blocks]
    assert [block.forward for block in plan.apply(model, CPU).blocks] == before
    want = tied_net()
    for net in (want, model):
        next_token_loss(net(tokens()[0]), tokens()[0]).backward()
    for a, b in zip(want.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("function", [compile_regions, compile_regions_fsdp2, compile_regions_deepspeed])
def test_regions_by_the_peers_names(function):
    model, plain = tied_net(), nn.Linear(2, 2)
    assert function(model, backend="eager") in (model, None)
    function(plain, backend="eager")
    assert has_compiled_regions(model) and has_compiled_regions(plain)
    assert model(tokens()[0]).shape == (8, 16, 64) and plain(torch.ones(1, 2)).shape == (1, 2)


def test_what_cannot_be_compiled_is_said(monkeypatch, tmp_path):
    for step in (compile_model(backend="tensorrt"), compile_blocks(backend="tensorrt")):
        with pytest.raises(PlanError, match=r"no compiler backend 'tensorrt' here: it has .*inductor"):
            Plan([single(), step]).apply(tied_net(), CPU)
    with pytest.raises(PlanError, match="Linear has no repeated blocks"):
        Plan([single(), compile_blocks(backend="eager")]).apply(nn.Linear(1, 1), CPU)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    Plan([single(), compile_model(backend="eager", cache_dir=tmp_path)]).apply(nn.Linear(1, 1), CPU)
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert cache_dir() == str(tmp_path)


@pytest.mark.parametrize(
    ("strategy", "regional"), [("ddp", False), ("ddp", True), ("fsdp2", False), ("fsdp2", True), ("fsdp1", True)]
)
def test_it_composes_with_sharing_over_ranks(ranks, strategy, regional):
    def body(strategy, regional):
        from accel_parallel import (
            FullyShardedDataParallelPlugin,
            NativeEngine,
            Prepared,
            ddp,
            fsdp1,
            full_state_dict,
            fully_shard_blocks,
        )
        from accel_state import PartialState

        state = PartialState(cpu=True)
        context = PlanContext(device=state.device, world_size=2)
        steps = {
            "ddp": [single(), ddp()],
            "fsdp1": [fsdp1(FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True))],
            "fsdp2": [fully_shard_blocks()],
        }[strategy]
        steps.insert(len(steps) - 1, compile_blocks(backend="eager")) if regional else steps.append(
            compile_model(backend="eager")
        )
        model = tied_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        engine = NativeEngine(Plan(steps), context)
        ready = engine.prepare(Prepared(models=(model,), optimizers=(optimizer,)))
        (model,), (optimizer,) = ready.models, ready.optimizers
        mine = [batch.chunk(2)[state.process_index] for batch in tokens()]
        return train(model, optimizer, mine, engine.clip_grad_norm_), full_state_dict(model)

    (want_norms, want), got = single_truth(), ranks(body, 2, strategy, regional)
    assert got[0][0] == pytest.approx(want_norms, rel=1e-5)
    for name, value in want.items():
        assert (got[0][1][name] - value).abs().max() < 1e-6, name
