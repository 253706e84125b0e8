"""The peer's configuration objects, for code that imports them: a file as a dataclass.

What accel itself reads goes through `files.py`; these only hold what such code asks for.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from accel_launch.files import default_config_path, load_mapping, peer_config_path
from accel_state.errors import SettingError
from accel_state.settings.table import nearest

default_config_file = str(default_config_path(os.environ))
"""Where `accel config` writes."""


class SageMakerDistributedType(StrEnum):
    """How a job on Amazon SageMaker is spread, in files that describe one."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


@dataclass
class BaseConfig:
    """What every configuration says.

    Args:
        compute_environment: LOCAL_MACHINE or AMAZON_SAGEMAKER.
        distributed_type: the kind of the run, `MULTI_GPU`, `FSDP`, ...
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        use_cpu: whether accelerators are left alone.
        debug: whether collectives check more.
    """

    compute_environment: str
    distributed_type: str
    mixed_precision: str | None
    use_cpu: bool
    debug: bool

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set, with enum members as their values."""
        plain = {name: getattr(value, "value", value) for name, value in vars(self).items()}
        return {name: value for name, value in plain.items() if value is not None}

    @classmethod
    def from_json_file(cls, json_file: str | None = None) -> BaseConfig:
        """Read a JSON file, the default one where none is named."""
        return _read(cls, json_file)

    @classmethod
    def from_yaml_file(cls, yaml_file: str | None = None) -> BaseConfig:
        """Read a YAML file, the default one where none is named."""
        return _read(cls, yaml_file)

    def to_json_file(self, json_file: str) -> None:
        """Write the fields as JSON."""
        _write(json_file, json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n")

    def to_yaml_file(self, yaml_file: str) -> None:
        """Write the fields as YAML."""
        import yaml

        _write(yaml_file, yaml.safe_dump(self.to_dict()))


@dataclass
class ClusterConfig(BaseConfig):
    """What a run on one's own machines says; each field as in the file."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool | None = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("deepspeed_config", "fsdp_config", "megatron_lm_config", "mpirun_config", "fp8_config"):
            if getattr(self, name) is None:
                setattr(self, name, {})


@dataclass
class SageMakerConfig(BaseConfig):
    """What a job on Amazon SageMaker says; read, never started."""

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str = "1.10.2"
    transformers_version: str = "4.17.0"
    py_version: str = "py38"
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] = field(default_factory=dict)
    enable_cpu_affinity: bool = False


def load_config_from_file(config_file: str | None) -> BaseConfig:
    """Read a configuration file as the object of its kind.

    Args:
        config_file: its path; the default locations are searched where it is None.

    Raises:
        LaunchError: it is absent or cannot be read.
        SettingError: it has an unknown key.
    """
    if config_file is None:
        candidates = (default_config_path(os.environ), peer_config_path(os.environ))
        config_file = str(next((path for path in candidates if path.is_file()), candidates[0]))
    kind = load_mapping(Path(config_file)).get("compute_environment", "LOCAL_MACHINE")
    return _read(SageMakerConfig if kind == "AMAZON_SAGEMAKER" else ClusterConfig, config_file)


def _read(kind: type[BaseConfig], path: str | None) -> BaseConfig:
    path = default_config_file if path is None else path
    found = load_mapping(Path(path))
    found.setdefault("compute_environment", "LOCAL_MACHINE")
    found.setdefault("distributed_type", "NO")
    if found.pop("fp16", None):
        found.setdefault("mixed_precision", "fp16")
    found.setdefault("mixed_precision", "no")
    found.setdefault("use_cpu", False)
    found.setdefault("debug", False)
    if "dynamo_backend" in found:
        found["dynamo_config"] = {"dynamo_backend": found.pop("dynamo_backend")}
    for key, word in (("mixed_precision", "no"), ("distributed_type", "NO")):
        found[key] = word if found[key] is False else found[key]  # unquoted `no`
    names = [field.name for field in dataclasses.fields(kind)]
    for key in found:
        if key not in names:
            raise SettingError(f"{path}: unknown key {key!r}{nearest(key, names)}. Correct or remove it")
    missing = [name for name in ("ec2_instance_type", "iam_role_name") if name in names and name not in found]
    if missing:
        raise SettingError(f"{path}: {' and '.join(missing)} is missing: a job on SageMaker needs it")
    return kind(**found)


def _write(path: str, text: str) -> None:
    from accel_launch.writing import write_atomically

    write_atomically(Path(path), text)
