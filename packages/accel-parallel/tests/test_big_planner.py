"""Sizes, ties and plans of models that are larger than a device."""

from __future__ import annotations

import random
from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accel_parallel import (
    CustomDtype,
    calculate_maximum_sizes,
    check_device_map,
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    clean_device_map,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    dtype_byte_size,
    extract_submodules_state_dict,
    find_tied_parameters,
    generate_device_map,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
    get_module_size_with_ties,
    has_several_devices,
    id_tensor_storage,
    infer_auto_device_map,
    retie_parameters,
)
from accel_parallel.dispatch.device_maps import place_of
from accel_state.errors import DeviceMapError, PlanError, SettingError
from accel_testkit.nets import BufferedNet


class Tied(nn.Module):
    """400 bytes: 160 shared by the first and the last layer, and 240 between them."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 4)
        self.mid = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.emb.weight


class RootParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(100, 100))
        self.b = nn.Parameter(torch.ones(100, 100))
        self.child = nn.Linear(100, 100, bias=False)


def three(*ties):
    model = nn.Sequential(OrderedDict(layer1=BufferedNet(), layer2=BufferedNet(), layer3=BufferedNet()))
    for tied, first in ties:
        model.get_submodule(tied).weight = model.get_submodule(first).weight
    return model


# ---- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GB", 10**9), ("1.5GB", 15 * 10**8), ("1GiB", 2**30), ("10KB", 10**4), ("1kb", 125), ("2MIB", 2**21), (5, 5)],
)
def test_sizes_are_read_with_their_units(text, size):
    assert convert_file_size_to_int(text) == size


@pytest.mark.parametrize("text", ["7", "100B", "GB", -1, None, True])
def test_what_is_no_size_is_refused_with_its_value(text):
    with pytest.raises(SettingError, match="is no size"):
        convert_file_size_to_int(text)


def test_bytes_per_number():
    sizes = [dtype_byte_size(d) for d in (torch.float32, torch.bool, CustomDtype.INT4, CustomDtype.FP8, "bfloat16")]
    assert sizes == [4, 0.125, 0.5, 1, 2]
    with pytest.raises(SettingError, match="none of torch's"):
        dtype_byte_size("float33")


def test_sizes_of_modules_and_tensors():
    sizes = compute_module_sizes(BufferedNet())
    assert (sizes[""], sizes["linear1"], sizes["batchnorm"], sizes["linear2.bias"]) == (236, 64, 72, 20)
    assert compute_module_total_buffer_size(BufferedNet()) == 40
    halved = compute_module_sizes(BufferedNet(), dtype=torch.float16)
    assert (halved["linear1"], halved["batchnorm"]) == (32, 8 * 4 + 8)  # the counter stays an int64
    assert compute_module_sizes(BufferedNet(), dtype=torch.float64)[""] == 236  # no weight grows
    assert compute_module_sizes(BufferedNet(), special_dtypes={"linear1.weight": CustomDtype.INT4})["linear1"] == 6 + 16
    assert compute_module_sizes(Tied())[""] == 400


def test_masks_are_counted_as_they_lie_in_memory():
    model = nn.Module()
    model.register_buffer("mask", torch.ones(100, dtype=torch.bool))
    assert compute_module_sizes(model)[""] == 100


def test_the_largest_layer():
    model = BufferedNet()
    assert calculate_maximum_sizes(model) == (236, (100, ["linear2"]))
    sizes = compute_module_sizes(model)
    assert get_max_layer_size([("", model)], sizes, ["BufferedNet"]) == (236, [""])


# ---- ties


def test_ties_are_found_and_made_again():
    model = Tied()
    groups = find_tied_parameters(model)
    assert groups == [["emb.weight", "head.weight"]]
    assert find_tied_parameters(BufferedNet()) == []
    model.emb.weight = nn.Parameter(model.emb.weight.detach().to("meta"))
    retie_parameters(model, groups)
    assert model.emb.weight is model.head.weight
    assert not model.emb.weight.is_meta


def test_what_shares_memory_has_one_id():
    base = torch.ones(4)
    assert id_tensor_storage(base) == id_tensor_storage(base[1:])
    assert id_tensor_storage(base) != id_tensor_storage(base.clone())
    first, second = torch.ones(2, device="meta"), torch.ones(2, device="meta")
    assert id_tensor_storage(first) != id_tensor_storage(second)


def test_ties_of_a_configuration():
    model = BufferedNet()
    assert check_tied_parameters_in_config(model) is False
    model.config = type("Config", (), {"tie_word_embeddings": True})()
    assert check_tied_parameters_in_config(model) is True


def test_a_map_that_parts_tied_weights_is_logged(caplog):
    check_tied_parameters_on_same_device([["emb.weight", "head.weight"]], {"emb": 0, "head": 1})
    assert "Tied parameters are on different devices" in caplog.text
    caplog.clear()
    check_tied_parameters_on_same_device([["emb.weight", "head.weight"]], {"": 0})
    assert not caplog.text


def test_a_module_with_what_it_shares():
    model = Tied()
    sizes = {"emb": 160, "emb.weight": 160, "head": 160, "head.weight": 160}
    size, names, modules = get_module_size_with_ties(["head.weight"], 160, sizes, list(model.named_children()))
    assert (size, names, modules) == (160, ["head"], [model.head])


# ---- maps


def test_the_longest_name_counts():
    device_map = {"": "cpu", "layer": 0, "layer.inner": 1}
    assert [place_of(name, device_map) for name in ("head.weight", "layer.weight", "layer.inner.bias")] == ["cpu", 0, 1]


def test_a_map_that_misses_parameters_lists_them():
    with pytest.raises(DeviceMapError, match=r"following parameters: linear2\.weight, linear2\.bias\. Name them"):
        check_device_map(BufferedNet(), {"linear1": 0, "batchnorm": "cpu"})


def test_a_map_with_unknown_names_warns():
    with pytest.warns(UserWarning, match="do not match any submodules in the model: \\['nope'\\]"):
        check_device_map(BufferedNet(), {"": 0, "nope": 1})


def test_entries_are_joined_where_all_agree():
    assert clean_device_map({"a.b": 0, "a.c": 0, "d": 1}) == {"a": 0, "d": 1}
    assert clean_device_map({"a.b": 0, "a.c": 0, "d": 0}) == {"": 0}
    assert clean_device_map({"a.b": 0, "a.c": 1, "d.e.f": 0, "d.e.g": 0}) == {"a.b": 0, "a.c": 1, "d": 0}
    assert list(clean_device_map({"a.b": 0, "a.c": 0, "d": 1})) == ["a", "d"]


def test_entries_of_some_modules():
    state = {"l1.weight": 1, "l11.weight": 2, "l2": 3}
    assert extract_submodules_state_dict(state, ["l1", "l2"]) == {"l1.weight": 1, "l2": 3}


def test_models_on_several_devices_are_told_apart():
    model = nn.Sequential(BufferedNet())
    assert not has_several_devices(model)
    model[0].hf_device_map = {"": 0}
    assert not has_several_devices(model)
    model[0].hf_device_map = {"linear1": 0, "batchnorm": "cpu", "linear2": "cpu"}
    assert has_several_devices(model)


# ---- memory


def test_memory_that_is_given_is_ordered_and_in_bytes():
    memory = get_max_memory({"disk": 1, "cpu": "1KB", 1: 2, 0: 3})
    assert list(memory.items()) == [(0, 3), (1, 2), ("cpu", 1000), ("disk", 1)]
    with pytest.raises(DeviceMapError, match="names a device 'gpu!'"):
        get_max_memory({"gpu!": 1})


def test_memory_here_is_that_of_the_cpu_at_least():
    assert get_max_memory()["cpu"] > 10**6


@pytest.mark.parametrize(
    ("given", "low_zero", "expected"),
    [
        ({0: 200, 1: 200}, False, {0: 200, 1: 200}),
        ({0: 300, 1: 500}, False, {0: 215, 1: 500}),  # 236 / 2, and a quarter more than the average layer of 78
        ({0: 300, "cpu": 1000}, False, {0: 300, "cpu": 1000}),
        ({0: 0, 1: 300, 2: 300}, False, {0: 0, 1: 215, 2: 300}),
        ({0: 300, 1: 300}, True, {0: 0, 1: 300}),
        ({"cpu": 100}, False, {"cpu": 100}),
    ],
)
def test_memory_is_balanced(given, low_zero, expected):
    assert get_balanced_memory(BufferedNet(), given, low_zero=low_zero) == expected


# ---- plans


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ({0: 1000}, {"": 0}),
        ({0: 200, 1: 200}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),  # room for linear2 is kept on 0
        ({0: 200, 1: 172}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),  # but not on 1
        ({0: 200, 1: 100, 2: 200}, {"linear1": 0, "batchnorm": 1, "linear2": 2}),
        ({0: 10, "cpu": 100}, {"linear1": "cpu", "batchnorm": "disk", "linear2": "disk"}),
        ({0: 236}, {"": 0}),  # nothing comes later, so nothing has to have room
        ({"cpu": 240}, {"": "cpu"}),
    ],
)
def test_devices_are_filled_in_order(memory, expected):
    with pytest.warns(UserWarning, match="40 bytes of buffers") if memory.get(0) == 10 else nullcontext():
        assert infer_auto_device_map(BufferedNet(), memory) == expected


def test_modules_are_split_unless_their_class_is_kept_whole():
    model = nn.Sequential(BufferedNet(), BufferedNet(), BufferedNet())
    split = {"0": 0, "1.linear1": 0, "1.batchnorm": 0, "1.linear2": 1, "2": 1}
    assert infer_auto_device_map(model, {0: 500, 1: 500}) == split
    assert infer_auto_device_map(model, {0: 500, 1: 500}, "BufferedNet") == {"0": 0, "1": 1, "2": 1}


def test_tensors_that_the_root_holds_are_planned_one_by_one():
    assert infer_auto_device_map(RootParameters(), {"cpu": 60_000}) == {"a": "cpu", "b": "disk", "child": "disk"}


def test_modules_without_tensors_run_beside_their_neighbours():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    plan = infer_auto_device_map(model, {0: 48, 1: 48}, clean_result=False)
    assert plan == {"0": 0, "1": 0, "2": 1, "3": 1}


T1, T2 = ("layer3.linear2", "layer1.linear2"), ("layer2.linear2", "layer1.linear2")
T3 = ("layer2.linear1", "layer1.linear1")


@pytest.mark.parametrize(
    ("ties", "expected"),
    [
        ([T1], {"layer1": 0, "layer3.linear2": 0, "layer2": 1, "layer3.linear1": 1, "layer3.batchnorm": 1}),
        (
            [T1, T2, T3],
            {
                "layer1": 0,
                "layer2.linear1": 0,
                "layer2.linear2": 0,
                "layer3.linear2": 0,
                "layer2.batchnorm": 1,
                "layer3.linear1": 1,
                "layer3.batchnorm": 1,
            },
        ),
    ],
)
def test_layers_that_share_a_tensor_go_together(ties, expected):
    assert infer_auto_device_map(three(*ties), {0: 400, 1: 500}) == expected


def test_a_device_that_nothing_fits_on_is_named_or_filled_out_of_order(caplog):
    inner = OrderedDict(linear1=nn.Linear(10, 4), linear2=nn.Linear(4, 4), linear3=nn.Linear(4, 8))
    model = nn.Sequential(OrderedDict(module=nn.Sequential(inner)))
    assert 0 not in infer_auto_device_map(model, {0: 256}).values()
    assert "insufficient memory: 0" in caplog.text
    filled = infer_auto_device_map(model, {0: 256}, fallback_allocation=True)
    assert filled == {"module.linear1": "disk", "module.linear2": 0, "module.linear3": "disk"}


def test_decisions_are_shown_when_asked_for(capsys):
    infer_auto_device_map(BufferedNet(), {0: 1000}, verbose=True)
    assert "the model (236 bytes) goes to 0" in capsys.readouterr().out


def random_model(rng, depth=0):
    model = nn.Module()
    for i in range(rng.randint(1, 4)):
        kind = rng.random()
        if kind < 0.5 or depth > 2:
            model.add_module(f"l{i}", nn.Linear(rng.randint(1, 6), rng.randint(1, 6), bias=rng.random() < 0.5))
        elif kind < 0.8:
            model.add_module(f"m{i}", random_model(rng, depth + 1))
        elif kind < 0.9:
            model.register_parameter(f"p{i}", nn.Parameter(torch.ones(rng.randint(1, 9))))
        else:
            model.register_buffer(f"b{i}", torch.ones(rng.randint(1, 9)))
    return model


@pytest.mark.filterwarnings("ignore:The offloaded layers have")
@pytest.mark.parametrize("options", [{}, {"clean_result": False}, {"fallback_allocation": True}], ids=str)
@given(seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_every_plan_covers_all_keeps_ties_and_fits(options, seed):
    rng = random.Random(seed)
    model = random_model(rng)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for _ in range(rng.randint(0, 3) if len(linears) > 1 else 0):
        first, second = rng.sample(linears, 2)
        first.weight = second.weight
    memory = {device: rng.randint(0, 400) for device in [*range(rng.randint(0, 3)), "cpu"]}
    plan = infer_auto_device_map(model, memory, **options)
    check_device_map(model, plan)
    places, used = {}, {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        place = place_of(name, plan)
        if places.setdefault(id(tensor), place) != place:
            pytest.fail(f"{name} is tied, and parted by {plan}")
    for identity, place in places.items():
        size = next(tensor.nbytes for _, tensor in tensors if id(tensor) == identity)
        used[place] = used.get(place, 0) + size
    assert all(device == "disk" or size <= memory[device] for device, size in used.items())


# ---- stages


def test_stages_are_balanced_runs_of_layers():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    assert generate_device_map(model, 2) == {"0": 0, "1": 0, "2": 1, "3": 1}
    with pytest.raises(PlanError, match="4 layers, fewer than the 5 ranks"):
        generate_device_map(model, 5)
