"""Checkpoints loaded into models of any placement."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import accel
from accel import (
    big_modeling,
    dispatch_model,
    hooks,
    inference,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    utils,
)
from accel.compat.table import places
from accel_state.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DeviceMapError,
    OffloadError,
    SettingError,
)
from accel_testkit.nets import BufferedNet


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(3, 4)
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        return self.head(self.emb(x))


def empty(kind=BufferedNet):
    with init_empty_weights():
        return kind().eval()


MIXED = {"linear1": "cpu", "batchnorm": "disk", "linear2": "disk"}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return BufferedNet().eval()


@pytest.fixture
def x():
    return torch.ones(2, 3)


@pytest.fixture
def folder(model, tmp_path):
    (tmp_path / "ck").mkdir()
    save_file(model.state_dict(), tmp_path / "ck" / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "ck"


def test_the_modules_offer_what_other_code_imports():
    for module, name in ((big_modeling, "big_modeling"), (hooks, "hooks"), (inference, "inference")):
        names = set(places()[f"accelerate.{name}"])
        assert names == set(module.__all__)
        assert all(getattr(module, each) is not None for each in names)
    assert utils.infer_auto_device_map is accel.infer_auto_device_map
    assert hooks.AlignDevicesHook.__name__ == "AlignDevicesHook"


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, "auto", "balanced", "balanced_low_0", "sequential"], ids=str)
def test_an_empty_model_gets_its_numbers(model, folder, x, device_map):
    loaded = load_checkpoint_and_dispatch(empty(), folder, device_map=device_map)
    assert torch.equal(loaded(x), model(x))
    assert not any(tensor.is_meta for tensor in loaded.state_dict().values())
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_weights_on_the_cpu_are_views_of_the_file_that_never_change_it(model, folder, x):
    before = (folder / "model.safetensors").read_bytes()
    loaded = load_checkpoint_and_dispatch(empty(), folder, device_map={"": "cpu"})
    first = loaded.linear1.weight.data_ptr()
    again = load_checkpoint_and_dispatch(empty(), folder, device_map={"": "cpu"})
    assert again.linear1.weight.data_ptr() != first  # a mapping of its own
    with torch.no_grad():
        loaded.linear1.weight.zero_()
    assert (folder / "model.safetensors").read_bytes() == before
    assert torch.equal(again(x), model(x))


def test_a_model_with_numbers_is_filled_in_place(model, folder, x):
    other = BufferedNet().eval()
    kept = dict(other.named_parameters())
    load_checkpoint_in_model(other, folder)
    assert torch.equal(other(x), model(x))
    assert all(parameter is kept[name] for name, parameter in other.named_parameters())


def test_weights_on_disk_stay_in_the_checkpoint(model, folder, x, tmp_path):
    loaded = load_checkpoint_and_dispatch(empty(), folder, device_map=MIXED, offload_folder=tmp_path / "off")
    assert torch.equal(loaded(x), model(x))
    assert loaded.hf_device_map == MIXED
    assert [path.name for path in (tmp_path / "off").iterdir()] == ["index.json"]
    entry = json.loads((tmp_path / "off" / "index.json").read_text())["linear2.weight"]
    assert (Path(entry["safetensors_file"]), entry["weight_name"]) == (folder / "model.safetensors", "linear2.weight")


def test_weights_on_disk_are_written_where_they_change(model, folder, x, tmp_path):
    loaded = load_checkpoint_and_dispatch(
        empty(), folder, device_map={"": "disk"}, offload_folder=tmp_path / "off", dtype=torch.float64
    )
    assert loaded.linear1.weight.dtype is torch.float64
    assert torch.allclose(loaded(x.double()), model.double()(x.double()))
    assert (tmp_path / "off" / "linear1.weight.dat").stat().st_size == 12 * 8


@pytest.mark.parametrize("kind", ["bin", "sharded"])
def test_other_forms_of_checkpoints(model, x, tmp_path, kind):
    if kind == "bin":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        accel.Accelerator(cpu=True).save_model(model, str(tmp_path), max_shard_size=100)
        assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = load_checkpoint_and_dispatch(empty(), tmp_path, device_map=MIXED, offload_folder=tmp_path / "off")
    assert torch.equal(loaded(x), model(x))


def test_a_file_that_could_run_code_is_refused(tmp_path):
    torch.save({"linear1.weight": Path("/")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointCorruptError, match="weights-only"):
        load_checkpoint_in_model(BufferedNet(), tmp_path)


def test_dtypes(folder):
    loaded = empty()
    load_checkpoint_in_model(loaded, folder, {"": "cpu"}, dtype="float16", keep_in_fp32_modules=["linear2"])
    dtypes = {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
    assert dtypes["linear1.weight"] is dtypes["batchnorm.running_mean"] is torch.float16
    assert dtypes["linear2.weight"] is torch.float32
    assert dtypes["batchnorm.num_batches_tracked"] is torch.int64
    with pytest.raises(SettingError, match="none of torch's"):
        load_checkpoint_in_model(loaded, folder, dtype="float33")


@pytest.mark.parametrize("name", ["emb.weight", "head.weight"])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"emb": "disk", "head": "disk"}], ids=str)
@pytest.mark.parametrize("dtype", [None, torch.float64], ids=str)
@pytest.mark.parametrize("is_empty", [True, False])
def test_ties_are_kept_whichever_name_the_file_has(tmp_path, name, device_map, dtype, is_empty):
    save_file({name: torch.arange(12.0).reshape(3, 4)}, tmp_path / "model.safetensors")
    model = empty(Tied) if is_empty else Tied()
    load_checkpoint_and_dispatch(
        model, tmp_path, device_map=device_map, offload_folder=tmp_path / "off", dtype=dtype, strict=True
    )
    assert model.head.weight is model.emb.weight
    assert torch.equal(model.head.weight + 0, torch.arange(12.0, dtype=dtype).reshape(3, 4))
    assert model(torch.tensor([0])).shape == (1, 3)


def test_differences_are_listed(model, tmp_path, caplog):
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("linear2")}
    save_file({**state, "extra.w": torch.ones(1)}, tmp_path / "model.safetensors")
    words = r'Missing key\(s\).*"linear2.weight", "linear2.bias".*Unexpected key\(s\).*"extra.w"'
    with pytest.raises(CheckpointMismatchError, match=words):
        load_checkpoint_in_model(BufferedNet(), tmp_path, strict=True)
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(BufferedNet(), tmp_path)
    assert "was loaded in part" in caplog.text
    with pytest.raises(OffloadError, match=r"linear2\.weight, linear2\.bias of BufferedNet have no numbers"):
        load_checkpoint_and_dispatch(empty(), tmp_path, device_map={"": "cpu"})


def test_shapes_that_differ_are_listed(tmp_path):
    save_file({"linear1.weight": torch.ones(2, 2), "linear2.bias": torch.ones(7)}, tmp_path / "model.safetensors")
    words = r"linear1\.weight is \(2, 2\) in the files and \(4, 3\) in the model.*linear2\.bias is \(7,\)"
    with pytest.raises(CheckpointMismatchError, match=words):
        load_checkpoint_in_model(BufferedNet(), tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device_map": "wrong"}, DeviceMapError, "please choose 'auto', 'balanced', 'balanced_low_0' or 'sequential'"),
        ({"device_map": MIXED}, DeviceMapError, "please pass along an `offload_folder`"),
        ({"device_map": {"linear1": "cpu"}}, DeviceMapError, "does not give any device"),
        ({"device_map": {"": "cpu"}, "broadcast_from_rank0": True}, SettingError, "pass no device_map"),
        ({"broadcast_from_rank0": True}, SettingError, "needs the ranks of a job"),
    ],
    ids=str,
)
def test_arguments_that_contradict_each_other(folder, options, error, message):
    with pytest.raises(error, match=message):
        load_checkpoint_and_dispatch(empty(), folder, **options)


def test_what_is_not_there_or_not_offered(tmp_path, folder):
    with pytest.raises(CheckpointNotFoundError, match="there is no"):
        load_checkpoint_and_dispatch(empty(), tmp_path / "nothing", device_map="auto")
    with pytest.raises(SettingError, match="bitsandbytes"):
        load_checkpoint_in_model(BufferedNet(), folder, offload_8bit_bnb=True)


def test_a_folder_with_safetensors_entries_is_read(model, folder, x, tmp_path):
    entry = {"safetensors_file": str(folder / "model.safetensors"), "dtype": "float32"}
    names = ["linear2.weight", "linear2.bias"]
    index = {name: {**entry, "weight_name": name} for name in names}
    loaded = empty()
    load_checkpoint_in_model(loaded, folder, {"": "cpu"})
    loaded.linear2.to("meta")
    dispatch_model(loaded, {"linear1": "cpu", "batchnorm": "cpu", "linear2": "disk"}, offload_index=index)
    assert torch.equal(loaded(x), model(x))


def sent_by_rank_0(folder, has_file):
    state = accel.PartialState(cpu=True)
    model = BufferedNet()
    where = folder if state.is_main_process and has_file else f"{folder}/nothing"
    try:
        load_checkpoint_in_model(model, where, broadcast_from_rank0=True, strict=True)
    except CheckpointNotFoundError as error:
        return str(error)
    return model.linear1.weight.tolist()


def test_rank_0_reads_and_sends(ranks, model, folder):
    assert ranks(sent_by_rank_0, 2, str(folder), True) == [model.linear1.weight.tolist()] * 2
    first, second = ranks(sent_by_rank_0, 2, str(folder), False)
    assert first == second
    assert "there is no" in first
