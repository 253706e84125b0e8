"""Models in several places, and weights in files."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_parallel import (
    AlignDevicesHook,
    NativeEngine,
    OffloadedWeightsLoader,
    Plan,
    PlanContext,
    PrefixedDataset,
    SequentialHook,
    attach_align_device_hook_on_blocks,
    disk_offload,
    dispatch_model,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    infer_auto_device_map,
    init_empty_weights,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    remove_hook_from_submodules,
    save_offload_index,
    single,
)
from accel_state import GradientState
from accel_state.errors import DeviceMapError, MissingExtraError, OffloadError, OffloadFolderError, PlanError
from accel_testkit.nets import BufferedNet


class RootParameters(nn.Module):
    """Reads its child's weight without calling the child."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(torch.randn(4, 4))
        self.child = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return nn.functional.linear(x @ self.a @ self.b, self.child.weight)


@pytest.fixture
def x():
    return torch.randn(2, 3)


@pytest.fixture
def model():
    return BufferedNet().eval()


# ---- dispatching


MIXED = {"linear1": "cpu", "batchnorm": "disk", "linear2": "disk"}


def test_a_model_in_memory_and_on_disk_computes_the_same(model, x, tmp_path):
    want = model(x)
    assert dispatch_model(model, MIXED, offload_dir=tmp_path / "new") is model
    assert model.hf_device_map == MIXED
    assert torch.equal(model(x), want)
    assert not model.linear1.weight.is_meta
    assert model.linear2.weight.is_meta
    assert isinstance(model._hf_hook, AlignDevicesHook)
    assert model._hf_hook.io_same_device
    assert [has_offloaded_params(part) for part in (model.linear1, model.batchnorm, model.linear2)] == [
        False,
        True,
        True,
    ]
    remove_hook_from_submodules(model)
    assert torch.equal(model(x), want)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_a_model_on_one_device_needs_no_hooks(model):
    dispatch_model(model, {"linear1": "cpu", "batchnorm": "cpu", "linear2": "cpu"})
    assert not hasattr(model, "_hf_hook")
    assert set(model.hf_device_map) == {"linear1", "batchnorm", "linear2"}
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert model._hf_hook.execution_device == "cpu"
    assert hasattr(model.linear1, "_hf_hook")


def test_a_whole_model_on_disk(model, x, tmp_path):
    want = model(x)
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path, offload_buffers=True)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(model(x), want)


def test_names_inside_other_names_count(x, tmp_path):
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 3))
    want = model(x)
    dispatch_model(model, {"": "cpu", "0.1": "disk"}, offload_dir=tmp_path)
    assert torch.equal(model(x), want)
    assert [layer.weight.is_meta for layer in (model[0][0], model[0][1], model[1])] == [False, True, False]


def test_single_tensors_of_a_module_and_weights_that_are_read_only(tmp_path):
    model, x = RootParameters(), torch.randn(2, 4)
    want = model(x)
    plan = infer_auto_device_map(model, {"cpu": 100})
    assert plan == {"a": "cpu", "b": "disk", "child": "disk"}
    dispatch_model(model, plan, offload_dir=tmp_path)
    assert torch.equal(model(x), want)
    assert (model.a.is_meta, model.b.is_meta) == (False, True)
    assert isinstance(model._hf_hook, SequentialHook)


def test_a_tensor_apart_from_where_its_module_computes():
    model = nn.Linear(3, 3)
    attach_align_device_hook_on_blocks(model, {"weight": "cpu", "bias": "meta"}, {"weight": False, "bias": False})
    with pytest.raises((RuntimeError, NotImplementedError)):  # a meta tensor has nothing to bring
        model(torch.ones(1, 3))
    assert model.bias.is_meta


def test_tied_weights_stay_tied_and_are_stored_once_in_memory(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    want = model(torch.ones(1, 3))
    dispatch_model(model, {"0": "disk", "1": "cpu", "2": "disk"}, offload_dir=tmp_path)
    assert model[0].weight is model[2].weight
    assert torch.equal(model(torch.ones(1, 3)), want)
    remove_hook_from_submodules(model)
    assert model[0].weight is model[2].weight


def test_keyword_arguments_and_nested_outputs_pass(tmp_path):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x, *, flag, more):
            assert flag == "kept"
            return {"out": [self.inner(x), more["y"]]}

    model = Deep()
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    found = model(torch.ones(1, 3), flag="kept", more={"y": torch.ones(1)})
    assert found["out"][0].shape == (1, 3)


@pytest.mark.parametrize("name", ["to", "cuda"])
def test_a_model_with_offloaded_weights_is_not_moved(model, tmp_path, name):
    dispatch_model(model, MIXED, offload_dir=tmp_path)
    with pytest.raises(OffloadError, match="You can't move a model that has some modules offloaded"):
        getattr(model, name)()
    remove_hook_from_submodules(model)
    assert model.to("cpu") is model


def test_weights_on_disk_need_a_place(model):
    with pytest.raises(DeviceMapError, match=r"We need an `offload_dir` .* offloaded: batchnorm, linear2\."):
        dispatch_model(model, MIXED)


def test_a_map_has_to_cover_the_model(model):
    with pytest.raises(DeviceMapError, match="does not give any device for the following parameters: linear2"):
        dispatch_model(model, {"linear1": "cpu", "batchnorm": "cpu"})


def test_no_tensor_is_left_without_numbers(tmp_path):
    with init_empty_weights():
        model = BufferedNet()
    for device_map in (MIXED, {"": "cpu"}, {"": "disk"}):
        with pytest.raises(OffloadError, match=r"linear1\.weight.* have no numbers: they are on the meta device"):
            dispatch_model(model, device_map, offload_dir=tmp_path)
    with pytest.raises(OffloadError, match="have no numbers"):
        disk_offload(model, tmp_path, "cpu")


def test_an_empty_model_takes_its_numbers_from_a_state_dict_and_a_folder(model, x, tmp_path):
    want, state = model(x), model.state_dict()
    offload_state_dict(tmp_path, {name: tensor for name, tensor in state.items() if name.startswith("linear2")})
    with init_empty_weights():
        empty = BufferedNet().eval()
    own = {name: tensor for name, tensor in state.items() if not name.startswith("linear2")}
    dispatch_model(
        empty, {"linear1": "cpu", "batchnorm": "cpu", "linear2": "disk"}, state_dict=own, offload_dir=tmp_path
    )
    assert torch.equal(empty(x), want)


def test_weights_that_the_model_has_replace_those_of_an_old_folder(model, x, tmp_path):
    offload_state_dict(tmp_path, {name: tensor * 0 for name, tensor in model.state_dict().items()})
    want = model(x)
    dispatch_model(model, MIXED, offload_dir=tmp_path)
    assert torch.equal(model(x), want)


def test_a_model_can_be_offloaded_to_disk(model, x, tmp_path):
    want, state = model(x), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    disk_offload(model, tmp_path / "folder", "cpu", offload_buffers=True)
    assert torch.equal(model(x), want)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sorted(json.loads((tmp_path / "folder" / "index.json").read_text())) == sorted(state)
    whole = get_state_dict_offloaded_model(model)
    assert all(torch.equal(whole[name], tensor) for name, tensor in state.items())


def test_a_folder_that_cannot_be_written_says_so(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadFolderError, match=r"cannot be written to .* Give a folder on a disk with room"):
        disk_offload(model, tmp_path / "file", "cpu")
    with pytest.raises(OSError, match="cannot be written"):
        offload_weight(torch.ones(1), "w", tmp_path / "file" / "inner")


def test_a_full_disk_leaves_no_half_file(monkeypatch, tmp_path):
    def replace(self, target):
        raise OSError(28, "No space left on device")

    offload_weight(torch.zeros(2), "w", tmp_path, {})
    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OffloadFolderError, match="No space left on device"):
        offload_weight(torch.ones(2), "w", tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["w.dat"]
    assert (tmp_path / "w.dat").read_bytes() == bytes(8)


def test_a_model_on_several_devices_is_not_prepared_for_several_ranks(model):
    model.hf_device_map = MIXED
    context = PlanContext(device=torch.device("cpu"), world_size=2)
    engine = NativeEngine(Plan([single()]), context, gradient_state=GradientState())
    with pytest.raises(PlanError, match=r"its device map puts parts of the model on .*2 ranks train"):
        engine.prepare_model(model)


# ---- files


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_a_tensor_is_written_and_mapped(dtype, tmp_path):
    tensor = torch.arange(6).reshape(2, 3).t().to(dtype)
    index = offload_weight(tensor, "layer.weight", tmp_path, {})
    assert index == {"layer.weight": {"dtype": str(dtype).removeprefix("torch."), "shape": [3, 2]}}
    found = load_offloaded_weight(tmp_path / "layer.weight.dat", index["layer.weight"])
    assert found.dtype is dtype
    assert torch.equal(found.to(torch.float32), tensor.to(torch.float32))


def test_the_form_of_a_folder(tmp_path):
    (tmp_path / "w.dat").write_bytes(struct.pack("<3f", 1, 2, 3))
    (tmp_path / "h.dat").write_bytes(struct.pack("<2H", 0x3F80, 0x4000))
    (tmp_path / "index.json").write_text(
        '{"w": {"dtype": "float32", "shape": [3]}, "h": {"dtype": "bfloat16", "shape": [2, 1]}}'
    )
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    assert weights["w"].tolist() == [1, 2, 3]
    assert weights["h"].tolist() == [[1], [2]]
    offload_state_dict(tmp_path / "ours", dict(weights))
    for name in ("w.dat", "h.dat"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / name).read_bytes()
    assert json.loads((tmp_path / "ours/index.json").read_text()) == json.loads((tmp_path / "index.json").read_text())


def test_numbers_without_dimensions_and_without_elements(tmp_path):
    for name, tensor in (("scalar", torch.tensor(3.0)), ("none", torch.ones(0, 2))):
        index = offload_weight(tensor, name, tmp_path, {})
        assert torch.equal(load_offloaded_weight(tmp_path / f"{name}.dat", index[name]), tensor)


def test_a_folders_index_grows(tmp_path):
    save_offload_index({"a": {"dtype": "float32", "shape": []}}, tmp_path)
    save_offload_index({}, tmp_path)
    save_offload_index({"b": {"dtype": "float32", "shape": []}}, tmp_path)
    assert sorted(json.loads((tmp_path / "index.json").read_text())) == ["a", "b"]
    assert offload_weight(torch.ones(1), "c", tmp_path) is None


def test_writing_to_what_was_mapped_never_reaches_the_file(tmp_path):
    index = offload_weight(torch.zeros(2), "w", tmp_path, {})
    load_offloaded_weight(tmp_path / "w.dat", index["w"]).fill_(7)
    assert (tmp_path / "w.dat").read_bytes() == bytes(8)


def test_files_are_mapped_once_and_anew_when_replaced(tmp_path):
    offload_state_dict(tmp_path, {"w": torch.zeros(2)})
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    first = weights["w"]
    assert weights["w"] is first
    offload_weight(torch.ones(2), "w", tmp_path)
    assert weights["w"].tolist() == [1, 1]
    assert first.tolist() == [0, 0]


def test_weights_from_memory_and_from_a_folder(tmp_path):
    offload_state_dict(tmp_path, {"a.w": torch.ones(2), "b.w": torch.zeros(1)})
    weights = OffloadedWeightsLoader({"c.w": torch.ones(3)}, tmp_path, device="cpu")
    assert list(weights) == ["c.w", "a.w", "b.w"]
    assert (len(weights), "a.w" in weights, "x" in weights) == (3, True, False)
    part = PrefixedDataset(weights, "a.")
    assert (list(part), len(part), "w" in part) == (["a.w"], 1, True)
    assert part["w"].tolist() == [1, 1]
    assert (weights.is_on_disk("a.w"), weights.is_on_disk("c.w")) == (True, False)
    with pytest.raises(KeyError):
        weights["x"]
    with pytest.raises(ValueError, match="Need either a `state_dict`, a `save_folder` or an `index`"):
        OffloadedWeightsLoader()


def test_offloaded_weights_come_back_into_a_model(tmp_path):
    model = nn.Linear(2, 2)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offload_state_dict(tmp_path, state)
    with init_empty_weights():
        model = nn.Linear(2, 2)
    load_offloaded_weights(model, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    load_offloaded_weights(model, None, tmp_path)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "w.dat").unlink(), "w.dat, which holds offloaded weights, cannot be read"),
        (lambda folder: (folder / "w.dat").write_bytes(b"123"), "w.dat has 3 bytes, and 8 by its entry"),
        (lambda folder: (folder / "index.json").write_text("{"), "index.json cannot be read"),
        (lambda folder: (folder / "index.json").write_text("[]"), "is no index of weights"),
        (lambda folder: (folder / "index.json").write_text('{"w": {"shape": [2]}}'), "no dtype and shape"),
        (
            lambda folder: (folder / "index.json").write_text('{"w": {"dtype": "x", "shape": [2]}}'),
            "no dtype and shape",
        ),
        (lambda folder: (folder / "index.json").unlink(), "holds no index.json, so no offloaded weights"),
        (
            lambda folder: (folder / "index.json").write_text('{"../w": {"dtype": "float32", "shape": [2]}}'),
            "cannot be",
        ),
    ],
)
def test_a_damaged_folder_says_what_is_wrong(tmp_path, damage, message):
    offload_state_dict(tmp_path, {"w": torch.zeros(2)})
    damage(tmp_path)
    with pytest.raises(OffloadFolderError, match=message):
        dict(OffloadedWeightsLoader(save_folder=tmp_path))


def test_an_index_without_its_folder(tmp_path):
    weights = OffloadedWeightsLoader(index={"w": {"dtype": "float32", "shape": [2]}})
    with pytest.raises(OffloadFolderError, match="give save_folder, where it lies"):
        weights["w"]


def test_weights_in_safetensors_files_name_the_extra_that_reads_them(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "model.safetensors").write_bytes(b"")
    entry = {"safetensors_file": os.fspath(tmp_path / "model.safetensors"), "weight_name": "w", "dtype": "float32"}
    with pytest.raises(MissingExtraError, match=r"accel-parallel\[safetensors\]"):
        OffloadedWeightsLoader(index={"w": entry})["w"]
