"""Names of the peer's launcher that other code imports: a launch's command and environment, from parsed arguments."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from accel_state.errors import LaunchError

if TYPE_CHECKING:
    from accel_launch.plan import LaunchPlan

TORCH_LAUNCH_PARAMS: Final = [
    *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"),
    *("max_restarts", "monitor_interval", "start_method", "role", "module", "m", "no_python", "run_path", "log_dir"),
    *("r", "redirects", "t", "tee", "node_rank", "master_addr", "master_port"),
]
"""Arguments of torchrun by which the peer tells them from its own."""

_DEFAULT_PORT = 29500


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command and the whole environment of a launch of one process.

    Args:
        args: as `launch_command_parser()` parses them.

    Raises:
        LaunchError, SettingError: the request cannot be met.
    """
    (rank,) = _planned(args, num_processes=1).ranks
    return list(rank.command), {**os.environ, **rank.environment}


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """The whole environment of torchrun, and in `args` what it is to be told.

    Args:
        args: as `launch_command_parser()` parses them; gets `nproc_per_node` and `master_port`, on several machines
            `nnodes`, `node_rank` and `rdzv_endpoint`.

    Raises:
        LaunchError, SettingError: the request cannot be met.
    """
    plan = _planned(args)
    _tell_torchrun(args, plan)
    return {**os.environ, **_shared(plan)}


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """The command of DeepSpeed's own launcher and its whole environment.

    Args:
        args: as `launch_command_parser()` parses them. Where that launcher is not used, on one machine and with
            `--deepspeed-multinode-launcher standard`, the command is None, and `args` gets what torchrun is to be told.

    Raises:
        LaunchError, SettingError: the request cannot be met.
    """
    plan = _planned(args, use_deepspeed=True)
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path.cwd()))))
    environment = {**os.environ, "PYTHONPATH": path, **_shared(plan)}
    if plan.env_file is not None:
        return list(plan.ranks[0].command), environment
    _tell_torchrun(args, plan)
    return None, environment


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """The variables of torch_xla, and in `args` the pod's name and machines.

    Args:
        args: as `launch_command_parser()` parses them; for a pod with `tpu_name` and `tpu_vm` of a configuration file.
        current_env: gets the variables.
        pod: whether this is about a pod.

    Raises:
        LaunchError: a pod without a name.
    """
    if args.mixed_precision == "bf16":
        current_env["XLA_DOWNCAST_BF16" if args.downcast_bf16 else "XLA_USE_BF16"] = "1"
    if args.debug:
        current_env["ACCEL_DEBUG_MODE"] = current_env["ACCELERATE_DEBUG_MODE"] = "true"
    if pod:
        if not getattr(args, "tpu_name", None):
            raise LaunchError("tpu_name is missing: set it in `args`, as the configuration file has it")
        args.tpu, args.vm = args.tpu_name, getattr(args, "tpu_vm", None)
    return args, current_env


def prepare_sagemager_args_inputs(sagemaker_config: Any, args: argparse.Namespace) -> NoReturn:
    """Jobs on Amazon SageMaker cannot be started from here.

    Raises:
        LaunchError: always.
    """
    raise LaunchError(
        f"a job on Amazon SageMaker ({getattr(sagemaker_config, 'ec2_instance_type', sagemaker_config)!r}) cannot be "
        f"started from here: make {args.training_script!r} the entry point of a job of SageMaker's own estimator, and "
        "run `accel launch` in it"
    )


def install_xla(upgrade: bool = False) -> None:
    """Install the torch_xla that fits the torch which is there, in a notebook of Google Colab.

    Args:
        upgrade: take the newest torch and torch_xla instead.

    Raises:
        RuntimeError: this is no such notebook, or pip failed.
    """
    if "google.colab" not in sys.modules:
        raise RuntimeError("install_xla is for notebooks of Google Colab; elsewhere: pip install 'torch_xla[tpu]'")
    import importlib.metadata
    import subprocess

    release = ".".join(importlib.metadata.version("torch").partition("+")[0].split(".")[:2])
    wanted = ["--upgrade", "torch", "torch_xla[tpu]"] if upgrade else [f"torch_xla[tpu]=={release}.*"]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *wanted], check=False)
    if done.returncode:
        raise RuntimeError(f"pip could not install {' '.join(wanted)}: exit code {done.returncode}; it says why above")


def test_launch() -> None:
    """Raise where this process cannot find its place and device, and the others where there are any."""
    from accel_state import PartialState

    PartialState()


test_launch.__test__ = False  # type: ignore[attr-defined]  # the peer's name for it, no test of ours


def _planned(args: argparse.Namespace, **settings: Any) -> LaunchPlan:
    from accel_launch import flags
    from accel_launch.config import Target, resolve_config
    from accel_launch.plan import make_plan

    target = Target(args.training_script, tuple(args.training_script_args), bool(args.module), bool(args.no_python))
    return make_plan(resolve_config(target, {**flags.given_flags(args), **settings}))


def _shared(plan: LaunchPlan) -> Mapping[str, str]:
    """What a launcher gets: all but the ranks' places, which are its to tell."""
    from accel_launch.plan import TOPOLOGY_VARIABLES

    return {name: text for name, text in plan.ranks[0].environment.items() if name not in TOPOLOGY_VARIABLES}


def _tell_torchrun(args: argparse.Namespace, plan: LaunchPlan) -> None:
    num_machines = plan.config.value("num_machines")
    port = str(plan.config.value("main_process_port") or _DEFAULT_PORT)
    args.nproc_per_node = str(plan.config.value("num_processes") // num_machines)
    if num_machines == 1:
        args.master_port = port
        return
    args.nnodes, args.node_rank = str(num_machines), plan.config.value("machine_rank")
    args.rdzv_endpoint = f"{plan.config.value('main_process_ip')}:{port}"
