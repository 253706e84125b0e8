"""`accel estimate-memory`: sizes from files, builders and the Hub, and errors that tell what is wrong."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from safetensors.torch import save_file

from accel import estimate_command, estimate_command_parser
from accel.memory import Axes, estimate, find_weights, parse_axes
from accel_state.errors import MissingExtraError, SettingError

WEIGHTS = {"body.0.weight": torch.zeros(8, 4), "body.0.bias": torch.zeros(8), "head.weight": torch.zeros(2, 8)}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path)
    return path


def run(*arguments) -> None:
    estimate_command(estimate_command_parser().parse_args(list(map(str, arguments))))


def test_weights_gradients_and_moments_of_a_file(file, capsys):
    run(file, "--json")
    rows = {row["dtype"]: row for row in json.loads(capsys.readouterr().out)["estimates"]}
    num_items, layer = 32 + 8 + 16, 32 + 8
    assert rows["float32"] == {
        "dtype": "float32",
        "largest_layer": 4 * layer,
        "weights": 4 * num_items,
        "gradients": 4 * num_items,
        "optimizer": 8 * num_items,
        "training": 16 * num_items,
    }
    assert rows["float16"]["training"] == 8 * num_items
    assert rows["int4"]["weights"] == num_items // 2 and rows["int4"]["training"] is None


def test_what_is_estimated_is_what_training_allocates(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 64)).sum().backward()
    optimizer.step()
    state = [value for one in optimizer.state.values() for value in one.values() if value.ndim]
    tensors = [*model.parameters(), *(parameter.grad for parameter in model.parameters()), *state]
    assert estimate(find_weights(str(path)), "float32").training == sum(tensor.nbytes for tensor in tensors)


def test_a_folder_of_files_is_one_model(tmp_path):
    save_file({"a.weight": torch.zeros(4)}, tmp_path / "model-1.safetensors")
    save_file({"b.weight": torch.zeros(6)}, tmp_path / "model-2.safetensors")
    assert {(weight.name, weight.num_items) for weight in find_weights(str(tmp_path))} == {
        ("a.weight", 4),
        ("b.weight", 6),
    }


def test_a_builder_makes_the_model_without_memory(tmp_path, monkeypatch):
    (tmp_path / "builder.py").write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(1 << 20, 1 << 20), torch.nn.BatchNorm1d(4))\n"
        "    model[1].weight.requires_grad_(False)\n"
        "    return model\n"
        "def nothing():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    found = {weight.name: weight for weight in find_weights("builder:build")}
    assert found["0.weight"].num_items == 1 << 40 and found["0.weight"].is_trained
    assert not found["1.weight"].is_trained and not found["1.running_mean"].is_trained
    with pytest.raises(SettingError, match=r"returned a int, not a torch\.nn.Module"):
        find_weights("builder:nothing")
    with pytest.raises(SettingError, match="builder:absent cannot be found"):
        find_weights("builder:absent")


def test_a_rank_holds_its_share_and_one_layer_whole(file):
    weights = find_weights(str(file))
    whole, share = estimate(weights, "float32"), estimate(weights, "float32", Axes(dp_shard_size=2))
    assert share.weights == whole.weights // 2 and share.gradients == whole.gradients // 2
    assert share.training == whole.training // 2 + share.largest_layer
    assert estimate(weights, "float32", Axes(tp_size=2)).training == whole.training // 2


def test_the_table_for_people(file, capsys):
    run(file, "--dtypes", "float32", "int8", "--parallelism", "dp_shard_size=2")
    headline, heads, first, second, _ = capsys.readouterr().out.splitlines()
    assert headline == f"{file}: 56 weights, one rank's share of dp_shard_size=2"
    assert heads.split() == ["dtype", "largest", "layer", "weights", "gradients", "AdamW", "training"]
    assert first.split()[0] == "float32" and second.split()[-1] == "-"


@pytest.mark.parametrize("text", ["dp_shard_size", "dp_replicate_size=2", "tp_size=0", "tp_size=two"])
def test_axes_that_are_not_understood(text):
    with pytest.raises(SettingError, match="give dp_shard_size, cp_size, sp_size, tp_size, pp_size"):
        parse_axes(text)


def test_what_is_not_there_or_not_whole(tmp_path):
    with pytest.raises(SettingError, match=r"there is no file or folder '\./absent'"):
        find_weights("./absent")
    with pytest.raises(SettingError, match=r"neither \*\.safetensors nor a config\.json"):
        find_weights(str(tmp_path))
    broken = tmp_path / "model.safetensors"
    for content in (b"", b"short", b"\xff" * 16, (9).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"):
        broken.write_bytes(content)
        with pytest.raises(SettingError, match="is not a whole safetensors file"):
            find_weights(str(broken))


def test_a_configuration_needs_transformers(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match="needs transformers to build its model: pip install transformers"):
        find_weights(str(tmp_path))


class TestHub:
    """Names on the Hub, with a stand-in for its client."""

    @pytest.fixture
    def hub(self, monkeypatch):
        class HfHubHTTPError(OSError): ...

        class RepositoryNotFoundError(HfHubHTTPError): ...

        class GatedRepoError(RepositoryNotFoundError): ...

        class NotASafetensorsRepoError(Exception): ...

        class OfflineModeIsEnabled(ConnectionError): ...

        errors = types.ModuleType("huggingface_hub.errors")
        for kind in (HfHubHTTPError, RepositoryNotFoundError, GatedRepoError, NotASafetensorsRepoError):
            setattr(errors, kind.__name__, kind)
        errors.OfflineModeIsEnabled = OfflineModeIsEnabled
        client = types.ModuleType("huggingface_hub")
        client.asked = []
        client.answer = None

        def get_safetensors_metadata(name):
            client.asked.append(name)
            if isinstance(client.answer, Exception):
                raise client.answer
            tensor = types.SimpleNamespace(shape=[3, 5])
            return types.SimpleNamespace(files_metadata={"a": types.SimpleNamespace(tensors={"x.weight": tensor})})

        client.get_safetensors_metadata = get_safetensors_metadata
        client.errors = errors
        monkeypatch.setitem(sys.modules, "huggingface_hub", client)
        monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
        return client

    def test_only_headers_are_read(self, hub):
        assert [weight.num_items for weight in find_weights("org/model")] == [15]
        find_weights("resnet50", "timm")
        assert hub.asked == ["org/model", "timm/resnet50"]

    @pytest.mark.parametrize(
        ("kind", "words"),
        [
            ("GatedRepoError", "is gated: accept its terms"),
            ("RepositoryNotFoundError", "neither here nor on the Hub"),
            ("NotASafetensorsRepoError", "holds no safetensors"),
            ("OfflineModeIsEnabled", "HF_HUB_OFFLINE is set"),
            ("HfHubHTTPError", "the Hub cannot be reached"),
        ],
    )
    def test_offline_is_told_from_gated_and_absent(self, hub, kind, words):
        hub.answer = getattr(hub.errors, kind)("no")
        with pytest.raises(SettingError, match=words):
            find_weights("org/model")

    def test_the_client_is_an_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(MissingExtraError, match=r"pip install \"accel\[hub\]\""):
            find_weights("org/model")
