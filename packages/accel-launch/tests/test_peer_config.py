"""The peer's configuration objects."""

import pytest

from accel_launch import BaseConfig, ClusterConfig, SageMakerConfig, load_config_from_file


def test_a_file_as_an_object_and_back(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "distributed_type: MULTI_GPU\nmixed_precision: no\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\n"
    )
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig) and isinstance(config, BaseConfig)
    assert (config.num_processes, config.mixed_precision, config.fsdp_config) == (4, "no", {"fsdp_version": 2})
    for write, read, name in (
        (config.to_json_file, ClusterConfig.from_json_file, "a.json"),
        (config.to_yaml_file, ClusterConfig.from_yaml_file, "a.yaml"),
    ):
        write(str(tmp_path / name))
        assert read(str(tmp_path / name)) == config


def test_a_job_on_sagemaker_is_an_object_too(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: ml.p3\n")
    with pytest.raises(ValueError, match="iam_role_name is missing"):
        load_config_from_file(str(path))
    path.write_text("compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: ml.p3\niam_role_name: me\n")
    assert isinstance(load_config_from_file(str(path)), SageMakerConfig)


def test_unknown_keys_are_a_value_error(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("num_proceses: 4\n")
    with pytest.raises(ValueError, match="unknown key 'num_proceses'; did you mean 'num_processes'"):
        load_config_from_file(str(path))
