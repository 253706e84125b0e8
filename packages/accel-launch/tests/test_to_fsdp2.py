"""FSDP1 configurations as FSDP2 ones."""

from pathlib import Path

import pytest
import yaml

from accel_launch import read_config
from accel_launch.fsdp2 import convert_to_fsdp2
from accel_state.errors import LaunchError


def config(tmp_path, **settings):
    path = tmp_path / "config.yaml"
    fsdp = {key: settings.pop(key) for key in list(settings) if key.startswith("fsdp_")}
    path.write_text(yaml.safe_dump({"distributed_type": "FSDP", "fsdp_config": fsdp, **settings}))
    return path


def converted(tmp_path, **settings):
    return convert_to_fsdp2(read_config(config(tmp_path, **settings)))


@pytest.mark.parametrize(
    ("strategy", "reshard"), [("FULL_SHARD", "true"), (1, "true"), ("SHARD_GRAD_OP", "false"), (2, "false")]
)
def test_the_strategy_says_whether_parameters_are_freed_after_forward(tmp_path, strategy, reshard):
    values, notes = converted(tmp_path, fsdp_sharding_strategy=strategy, fsdp_offload_params=True)
    assert values["fsdp_reshard_after_forward"] == reshard and values["fsdp_version"] == 2
    assert values["fsdp_offload_params"] is True and "fsdp_sharding_strategy" not in values and notes == []


def test_a_hybrid_strategy_becomes_a_mesh_with_a_replica_on_each_machine(tmp_path):
    values, _ = converted(tmp_path, fsdp_sharding_strategy="HYBRID_SHARD", num_processes=16, num_machines=2)
    assert values["parallelism_config_dp_replicate_size"] == 2 and values["parallelism_config_dp_shard_size"] == 8


def test_what_has_no_meaning_any_more_is_left_out_and_named(tmp_path):
    dropped = {"fsdp_use_orig_params": True, "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_sync_module_states": True}
    values, notes = converted(tmp_path, fsdp_state_dict_type="LOCAL_STATE_DICT", **dropped)
    assert not dropped.keys() & values.keys() and values["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
    assert len(notes) == 4 and all(any(key in note for note in notes) for key in dropped)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"distributed_type": "MULTI_GPU"}, "is not for FSDP"),
        ({"fsdp_version": 2}, "is for FSDP2 already"),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, "write `distributed_type: MULTI_GPU` for DDP"),
        ({"fsdp_sharding_strategy": "HALF"}, "'HALF' is not allowed: FULL_SHARD"),
        ({"fsdp_sharding_strategy": 4}, "give num_processes"),
    ],
)
def test_what_cannot_be_converted(tmp_path, settings, words):
    with pytest.raises(LaunchError, match=words):
        converted(tmp_path, **settings)


def test_the_command_writes_what_launch_reads(accel):
    path = config(accel.folder, fsdp_sharding_strategy="SHARD_GRAD_OP", num_processes=2)
    before = path.read_text()
    done = accel("to-fsdp2", "--config_file", path, "--output-file", accel.folder / "new.yaml")
    assert done.returncode == 0, done.stderr
    assert path.read_text() == before
    found = read_config(accel.folder / "new.yaml").values
    assert found["fsdp_version"] == 2 and found["num_processes"] == 2 and found["use_fsdp"]
    assert accel("to-fsdp2", "--config-file", path, "--overwrite").returncode == 0
    assert Path(path).read_text() == (accel.folder / "new.yaml").read_text()


@pytest.mark.parametrize("flags", [[], ["--overwrite", "--output-file", "x.yaml"]])
def test_it_has_to_know_where_to_write(accel, flags):
    done = accel("to-fsdp2", "--config-file", config(accel.folder), *flags)
    assert done.returncode == 2 and "either --output-file FILE or --overwrite" in done.stderr
