import pytest
import torch
from torch import nn

from accel_parallel import (
    FullyShardedDataParallelPlugin,
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    ensure_weights_retied,
    fsdp2_canonicalize_names,
    fsdp2_switch_optimizer_parameters,
    get_module_children_bottom_up,
    get_module_class_from_name,
    get_parameters_from_modules,
)
from accel_state.errors import SettingError
from accel_testkit.training import tied_net


def test_plugins_made_afterwards_load_from_rank_0(monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # restored afterwards
    enable_fsdp_ram_efficient_loading()
    assert FullyShardedDataParallelPlugin(fsdp_version=2).cpu_ram_efficient_loading
    disable_fsdp_ram_efficient_loading()
    assert not FullyShardedDataParallelPlugin(fsdp_version=2).cpu_ram_efficient_loading


def test_names_lose_what_wrappers_add():
    names = {"a._checkpoint_wrapped_module.w": 1, "_orig_mod.b": 2, "x.y": 3}
    assert fsdp2_canonicalize_names(names) == {"a.w": 1, "b": 2, "x.y": 3}


def test_modules_come_after_those_inside_them():
    inner = nn.Sequential(nn.ReLU())
    model = nn.Sequential(nn.Linear(1, 1), inner)
    assert get_module_children_bottom_up(model) == [model[0], inner[0], inner, model]
    assert [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)] == ["0", "1.0", "1", ""]


def test_an_optimizer_is_switched_as_a_whole_or_not_at_all():
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [old.weight]}, {"params": [old.bias], "lr": 0.5}], lr=1.0)
    with pytest.raises(KeyError, match="has no successor in the mapping"):
        fsdp2_switch_optimizer_parameters(optimizer, {old.weight.data_ptr(): new.weight})
    assert optimizer.param_groups[0]["params"][0] is old.weight
    mapping = {a.data_ptr(): b for a, b in zip(old.parameters(), new.parameters(), strict=True)}
    fsdp2_switch_optimizer_parameters(optimizer, mapping)
    assert all(g["params"][0] is p for g, p in zip(optimizer.param_groups, new.parameters(), strict=True))
    assert optimizer.param_groups[1]["params"][0] is new.bias


def test_parameters_made_one_by_one_stay_shared():
    with torch.device("meta"):
        model = tied_net()

    def init(module):
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    retied = ensure_weights_retied(init, model, torch.device("cpu"))
    for module in model.modules():
        retied(module)
    assert model.logits.weight is model.embedding.weight and not model.logits.weight.is_meta
    assert ensure_weights_retied(init, nn.Linear(1, 1), "cpu") is init


def test_models_are_sharded_checkpointed_and_filled_by_name(ranks):
    def body():
        from types import SimpleNamespace

        from accel_parallel import (
            NativeEngine,
            Plan,
            PlanContext,
            fsdp2_apply_ac,
            fsdp2_load_full_state_dict,
            fsdp2_prepare_model,
            full_state_dict,
            single,
        )
        from accel_parallel.steps.activation_checkpointing import is_checkpointed
        from accel_state import PartialState

        state = PartialState(cpu=True)
        engine = NativeEngine(Plan([single()]), PlanContext(device=state.device, world_size=2))
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
        accelerator = SimpleNamespace(engine=engine, state=SimpleNamespace(fsdp_plugin=plugin))
        model = fsdp2_apply_ac(accelerator, tied_net())
        assert [is_checkpointed(block) for block in model.blocks] == [True, True]
        model = fsdp2_prepare_model(accelerator, model)
        assert hasattr(model.norm.weight, "device_mesh")
        other = tied_net()
        nn.init.constant_(other.norm.weight, 3.0)
        fsdp2_load_full_state_dict(accelerator, model, other.state_dict() if state.is_main_process else {})
        return full_state_dict(model)["norm.weight"].tolist() if state.is_main_process else full_state_dict(model)

    first, second = ranks(body, 2)
    assert first == [3.0] * 32 and second == {}


def test_parameters_of_modules_are_found_by_name_or_as_they_are():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    first = set(model[0].parameters())
    assert get_parameters_from_modules("0", model, "cpu") == first
    assert get_parameters_from_modules([model[0]], model, "cpu") == first
    assert get_parameters_from_modules(None, model, "cpu") == set()
    with pytest.raises(SettingError, match="fits no module"):
        get_parameters_from_modules("nope", model, "cpu")


def test_a_class_is_found_by_its_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    assert get_module_class_from_name(model, "ReLU") is nn.ReLU
    assert get_module_class_from_name(model, "Sequential") is nn.Sequential
    assert get_module_class_from_name(model, "Conv2d") is None
