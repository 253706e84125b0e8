"""The manifest: what was written is read, and nothing hostile or damaged passes."""

from __future__ import annotations

import json

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from accel_ckpt.boxes import whole_box
from accel_ckpt.durable import FileEntry
from accel_ckpt.manifest import Manifest, ObjectEntry, dump_manifest, read_manifest
from accel_ckpt.names import FORMAT_VERSION
from accel_ckpt.tensors import Piece, TensorEntry
from accel_state.errors import CheckpointCorruptError, CheckpointError

FILE = FileEntry(size_bytes=3, xxh3_128="00")
names = st.text(st.characters(blacklist_characters="/\\:\0"), min_size=1).filter(lambda name: name not in (".", ".."))


def manifest(**changes) -> Manifest:
    tensors = {
        "weight": TensorEntry(
            dtype="float32", shape=(2, 3), pieces=(Piece(file="model.safetensors", box=whole_box((2, 3))),)
        )
    }
    fields = {
        "step": 7,
        "seed": None,
        "world_size": 2,
        "created_unix_s": 1.5,
        "metrics": {"loss": float("nan"), "acc": 0.5},
        "metadata": {"note": "ü"},
        "versions": {"torch": "2"},
        "files": {"model.safetensors": FILE, "sub/dir/notes.txt": FILE},
        "objects": {"net": ObjectEntry(kind="model", type="Net", tensors=tensors, aliases={"tied": "weight"})},
    }
    return Manifest(**{**fields, **changes})


def sealed(body: dict) -> bytes:
    text = json.dumps(body, separators=(",", ":"))
    return json.dumps({"xxh3_128": xxhash.xxh3_128_hexdigest(text.encode()), "manifest": body}).encode()


def body_of(text: bytes) -> dict:
    return json.loads(text)["manifest"]


def test_it_comes_back(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_bytes(dump_manifest(manifest()))
    back = read_manifest(path)
    assert str(back) == str(manifest())  # text, since NaN differs from itself


@given(names, names)
def test_harmless_names_come_back(tmp_path_factory, file_name, object_name):
    path = tmp_path_factory.mktemp("m") / "m.json"
    written = manifest(
        files={f"extra/{file_name}": FILE}, objects={object_name: ObjectEntry(kind="stateful", type="X")}
    )
    path.write_bytes(dump_manifest(written))
    back = read_manifest(path)
    assert list(back.files) == [f"extra/{file_name}"]
    assert list(back.objects) == [object_name]


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/../../x",
        "/etc/passwd",
        "//x",
        "a//b",
        "./a",
        "a/",
        "",
        ".",
        "..",
        "a\\..\\b",
        "C:x",
        "a\0b",
        "manifest.json",
        ".accel-journal/model.safetensors",
        ".accel-owner",
    ],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    body = body_of(dump_manifest(manifest()))
    body["files"][name] = {"size_bytes": 0, "xxh3_128": ""}
    path = tmp_path / "m.json"
    path.write_bytes(sealed(body))
    with pytest.raises(CheckpointCorruptError, match=r"name .*(not allowed|absolute)"):
        read_manifest(path)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (["files"], []),
        (["files", "model.safetensors", "size_bytes"], -1),
        (["files", "model.safetensors", "size_bytes"], True),
        (["files", "model.safetensors", "xxh3_128"], 5),
        (["objects", "net", "kind"], "pickle"),
        (["objects", "net", "tensors", "weight", "dtype"], "object"),
        (["objects", "net", "tensors", "weight", "dtype"], []),
        (["objects", "net", "tensors", "weight", "shape"], [-1]),
        (["objects", "net", "tensors", "weight", "shape"], [2.0]),
        (["objects", "net", "tensors", "weight", "shape"], [1 << 40, 1 << 40]),
        (["objects", "net", "tensors", "weight", "file"], "elsewhere"),
        (["objects", "net", "aliases"], {"a": 1}),
        (["objects", "net", "aliases"], {"a": "absent"}),
        (["metrics"], {"loss": "low"}),
        (["step"], 1.5),
        (["world_size"], None),
        (["versions"], 3),
        (["format"], "other"),
        (["format_version"], "1"),
    ],
)
def test_fields_of_other_kinds_are_refused(tmp_path, where, value):
    body = body_of(dump_manifest(manifest()))
    inner = body
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    path = tmp_path / "m.json"
    path.write_bytes(sealed(body))
    with pytest.raises(CheckpointCorruptError, match=r"m\.json"):
        read_manifest(path)


def test_a_newer_format_is_named(tmp_path):
    body = body_of(dump_manifest(manifest()))
    body["format_version"] = FORMAT_VERSION + 1
    (tmp_path / "m.json").write_bytes(sealed(body))
    with pytest.raises(CheckpointError, match=f"has format version {FORMAT_VERSION + 1}.*install a newer"):
        read_manifest(tmp_path / "m.json")


def test_every_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "m.json"
    text = dump_manifest(manifest())
    for place in range(0, len(text) - 1, 3):
        damaged = bytearray(text)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        try:
            assert str(read_manifest(path)) == str(manifest()), f"byte {place}"
        except CheckpointCorruptError:
            continue


@given(st.binary(max_size=200))
def test_noise_is_never_anything_but_damaged(tmp_path_factory, noise):
    path = tmp_path_factory.mktemp("m") / "m.json"
    path.write_bytes(noise)
    with pytest.raises(CheckpointCorruptError):
        read_manifest(path)
