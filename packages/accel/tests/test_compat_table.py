"""The one table of names, and the files that are generated from it."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import pytest

import accel.compat
from accel.compat.generate import alias_files, write
from accel.compat.table import fetch, is_offered, places

MEMBERS = ("data", "precision", "parallel", "ckpt", "tracking", "launch", "state")


def test_the_committed_files_are_the_generated_ones(tmp_path: Path) -> None:
    write(tmp_path / "alias")
    generated, committed = (
        {
            path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
            for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        for folder in (tmp_path / "alias", accel.compat.ALIAS_FOLDER)
    )
    assert committed == generated == alias_files(), "run `python -m accel.compat.generate`"


def test_each_name_has_one_owner_per_place() -> None:
    lines = (Path(accel.compat.__file__).with_name("table.txt")).read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    count = Counter((name, place) for name, _, *where in rows for place in where)
    assert [entry for entry, times in count.items() if times > 1] == []


def test_no_name_is_offered_by_another_package_than_its_owner() -> None:
    public = {f"accel_{member}": set(importlib.import_module(f"accel_{member}").__all__) for member in MEMBERS}
    names = {(name, owner) for names in places().values() for name, owner in names.items() if ":" not in owner}
    elsewhere = {
        name: package
        for name, owner in names
        for package, exported in public.items()
        if name in exported and owner != package and not is_offered(name, owner)
    }
    assert elsewhere == {}, "correct the owner in table.txt"


@pytest.mark.parametrize("place", list(places()))
def test_what_a_place_offers_can_be_fetched(place: str) -> None:
    for name, owner in places()[place].items():
        if is_offered(name, owner):
            fetch(name, owner)


def test_names_that_old_clients_need_are_offered() -> None:
    utils = places()["accelerate.utils"]
    for name in ("DistributedType", "LoggerType", "gather", "set_seed", "send_to_device", "tqdm"):
        assert is_offered(name, utils[name]), name


ENGINES_BRING = {
    "DeepSpeed": {
        "DeepSpeedPlugin",
        "DeepSpeedSchedulerWrapper",
        "DummyOptim",
        "DummyScheduler",
        "GatheredParameters",
        "HfDeepSpeedConfig",
        "get_active_deepspeed_plugin",
    },
    "Megatron-LM": {
        "AbstractTrainStep",
        "BertTrainStep",
        "GPTTrainStep",
        "MegatronLMDummyDataLoader",
        "MegatronLMDummyScheduler",
        "MegatronLMPlugin",
        "T5TrainStep",
        "add_model_config_to_megatron_parser",
        "avg_losses_across_data_parallel_group",
    },
    "bitsandbytes": {"BnbQuantizationConfig", "has_4bit_bnb_layers", "load_and_quantize_model"},
}
"""The names that are not offered, by the library whose engine will bring them."""


def test_only_names_of_engines_are_missing() -> None:
    missing = {name for names in places().values() for name, owner in names.items() if not is_offered(name, owner)}
    assert missing == set().union(*ENGINES_BRING.values())
