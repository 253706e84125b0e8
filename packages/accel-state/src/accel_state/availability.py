"""Whether a library or a kind of device can be used here: cached, and without importing what is asked about.

A library counts as there when Python would find code for it. A folder of its name that holds none (`wandb/`, where
runs are logged) does not count, and neither does a package whose own machinery raises while it is looked for. Devices
are looked up in the table of `accel_state.devices`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from functools import cache

from accel_state.environment import parse_flag_from_env


@cache
def is_installed(name: str) -> bool:
    """Whether `import name` would find code; nothing is imported but the parents of a dotted name.

    Args:
        name: of a module, as `megatron.core`.
    """
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        spec = importlib.util.find_spec(name)
    except Exception:  # noqa: BLE001  (a parent that fails to import, with whatever error, is not usable either)
        return False
    return spec is not None and spec.origin is not None  # a bare folder has no origin


@cache
def installed_version(distribution: str) -> str | None:
    """The release of a distribution, or None where it is not installed or says nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_at_least(module: str, minimum: str, distribution: str | None = None) -> bool:
    """Whether a library is there of some release; one whose release is none (`git-abc`) counts as newer."""
    from accel_state.versions import compare_versions

    version = installed_version(distribution or module) if is_installed(module) else None
    if version is None:
        return False
    return not version[:1].isdigit() or compare_versions(version, ">=", minimum)


# ---------------------------------------------------------------- libraries


def is_aim_available() -> bool:
    """Whether aim is installed."""
    return is_installed("aim")


def is_amdsmi_available() -> bool:
    """Whether amdsmi is installed."""
    return is_installed("amdsmi")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, of `min_version` at least if one is given."""
    return is_installed("bitsandbytes") if min_version is None else _is_at_least("bitsandbytes", min_version)


def is_4bit_bnb_available() -> bool:
    """Whether bitsandbytes can quantise to 4 bits (0.39)."""
    return _is_at_least("bitsandbytes", "0.39.0")


def is_8bit_bnb_available() -> bool:
    """Whether bitsandbytes can quantise to 8 bits in its present form (0.37.2)."""
    return _is_at_least("bitsandbytes", "0.37.2")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether bitsandbytes runs on more than CUDA (0.46)."""
    return _is_at_least("bitsandbytes", "0.46.0")


def is_boto3_available() -> bool:
    """Whether boto3 is installed."""
    return is_installed("boto3")


def is_clearml_available() -> bool:
    """Whether clearml is installed."""
    return is_installed("clearml")


def is_comet_ml_available() -> bool:
    """Whether comet_ml is installed."""
    return is_installed("comet_ml")


def is_datasets_available() -> bool:
    """Whether datasets is installed."""
    return is_installed("datasets")


def is_deepspeed_available() -> bool:
    """Whether DeepSpeed is installed."""
    return is_installed("deepspeed")


def is_dvclive_available() -> bool:
    """Whether dvclive is installed."""
    return is_installed("dvclive")


def is_import_timer_available() -> bool:
    """Whether import_timer is installed."""
    return is_installed("import_timer")


def is_lomo_available() -> bool:
    """Whether lomo_optim is installed."""
    return is_installed("lomo_optim")


def is_matplotlib_available() -> bool:
    """Whether matplotlib is installed."""
    return is_installed("matplotlib")


def is_megatron_lm_available() -> bool:
    """Whether Megatron-LM (megatron.core) is installed."""
    return is_installed("megatron.core")


def is_mlflow_available() -> bool:
    """Whether mlflow, or mlflow-skinny, is installed."""
    return is_installed("mlflow")


def is_msamp_available() -> bool:
    """Whether MS-AMP is installed."""
    return is_installed("msamp")


def is_pandas_available() -> bool:
    """Whether pandas is installed."""
    return is_installed("pandas")


def is_peft_available() -> bool:
    """Whether peft is installed."""
    return is_installed("peft")


def is_pippy_available() -> bool:
    """Whether torch has pipeline parallelism: every release that we run with has."""
    return is_installed("torch.distributed.pipelining")


def is_pynvml_available() -> bool:
    """Whether pynvml is installed."""
    return is_installed("pynvml")


def is_pytest_available() -> bool:
    """Whether pytest is installed."""
    return is_installed("pytest")


def is_rich_available() -> bool:
    """Whether rich is installed and asked for by ACCELERATE_ENABLE_RICH: it changes how errors look."""
    return is_installed("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH")


def is_sagemaker_available() -> bool:
    """Whether sagemaker is installed."""
    return is_installed("sagemaker")


def is_schedulefree_available() -> bool:
    """Whether schedulefree is installed."""
    return is_installed("schedulefree")


def is_swanlab_available() -> bool:
    """Whether swanlab is installed."""
    return is_installed("swanlab")


def is_tensorboard_available() -> bool:
    """Whether tensorboard, or tensorboardX, is installed."""
    return is_installed("tensorboard") or is_installed("tensorboardX")


def is_timm_available() -> bool:
    """Whether timm is installed."""
    return is_installed("timm")


def is_torchao_available() -> bool:
    """Whether torchao is installed, of a release with fp8 training (0.6.1)."""
    return _is_at_least("torchao", "0.6.1")


def is_torchdata_available() -> bool:
    """Whether torchdata is installed."""
    return is_installed("torchdata")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Whether torchdata has its stateful loader (0.8)."""
    return _is_at_least("torchdata", "0.8.0")


def is_torchvision_available() -> bool:
    """Whether torchvision is installed."""
    return is_installed("torchvision")


def is_trackio_available() -> bool:
    """Whether trackio is installed."""
    return is_installed("trackio")


def is_transformer_engine_available() -> bool:
    """Whether transformer-engine is installed with its part for torch."""
    return is_installed("transformer_engine") and _has_submodule("transformer_engine", "pytorch")


def is_transformers_available() -> bool:
    """Whether transformers is installed."""
    return is_installed("transformers")


def is_triton_available() -> bool:
    """Whether triton is installed."""
    return is_installed("triton")


def is_wandb_available() -> bool:
    """Whether wandb is installed."""
    return is_installed("wandb")


def is_weights_only_available() -> bool:
    """Whether `torch.load` takes `weights_only`: every release that we run with does."""
    return is_installed("torch")


@cache
def _has_submodule(package: str, submodule: str) -> bool:
    """Whether a package's folder holds a submodule; the package, which may be slow or broken, is not imported."""
    from importlib.machinery import PathFinder

    spec = importlib.util.find_spec(package)
    places = None if spec is None else spec.submodule_search_locations
    return places is not None and PathFinder.find_spec(submodule, list(places)) is not None
