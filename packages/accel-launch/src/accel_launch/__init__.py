"""Start training processes on one machine or many, from one command."""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from accel_launch.cli import main as main
    from accel_launch.commands.config import get_config_parser as get_config_parser
    from accel_launch.commands.config import write_basic_config as write_basic_config
    from accel_launch.commands.env import env_command as env_command
    from accel_launch.commands.env import env_command_parser as env_command_parser
    from accel_launch.commands.launch import launch_command as launch_command
    from accel_launch.commands.launch import launch_command_parser as launch_command_parser
    from accel_launch.commands.to_fsdp2 import to_fsdp2_command as to_fsdp2_command
    from accel_launch.commands.to_fsdp2 import to_fsdp2_command_parser as to_fsdp2_command_parser
    from accel_launch.commands.tpu import tpu_command_launcher as tpu_command_launcher
    from accel_launch.commands.tpu import tpu_command_parser as tpu_command_parser
    from accel_launch.config import LaunchConfig as LaunchConfig
    from accel_launch.config import Target as Target
    from accel_launch.config import resolve_config as resolve_config
    from accel_launch.files import ConfigFile as ConfigFile
    from accel_launch.files import find_config as find_config
    from accel_launch.files import read_config as read_config
    from accel_launch.notebook import PrepareForLaunch as PrepareForLaunch
    from accel_launch.notebook import debug_launcher as debug_launcher
    from accel_launch.notebook import notebook_launcher as notebook_launcher
    from accel_launch.parser import CommandParser as CommandParser
    from accel_launch.parser import CustomArgumentGroup as CustomArgumentGroup
    from accel_launch.parser import CustomArgumentParser as CustomArgumentParser
    from accel_launch.parser import add_settings as add_settings
    from accel_launch.peer_config import BaseConfig as BaseConfig
    from accel_launch.peer_config import ClusterConfig as ClusterConfig
    from accel_launch.peer_config import SageMakerConfig as SageMakerConfig
    from accel_launch.peer_config import SageMakerDistributedType as SageMakerDistributedType
    from accel_launch.peer_config import default_config_file as default_config_file
    from accel_launch.peer_config import load_config_from_file as load_config_from_file
    from accel_launch.peer_launching import TORCH_LAUNCH_PARAMS as TORCH_LAUNCH_PARAMS
    from accel_launch.peer_launching import install_xla as install_xla
    from accel_launch.peer_launching import prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env
    from accel_launch.peer_launching import prepare_multi_gpu_env as prepare_multi_gpu_env
    from accel_launch.peer_launching import prepare_sagemager_args_inputs as prepare_sagemager_args_inputs
    from accel_launch.peer_launching import prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env
    from accel_launch.peer_launching import prepare_tpu as prepare_tpu
    from accel_launch.peer_launching import test_launch as test_launch
    from accel_launch.plan import LaunchPlan as LaunchPlan
    from accel_launch.plan import RankPlan as RankPlan
    from accel_launch.plan import make_plan as make_plan
    from accel_launch.run import launch as launch
    from accel_launch.run import run_plan as run_plan

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "cli": ["main"],
        "commands.config": ["get_config_parser", "write_basic_config"],
        "commands.env": ["env_command", "env_command_parser"],
        "commands.launch": ["launch_command", "launch_command_parser"],
        "commands.to_fsdp2": ["to_fsdp2_command", "to_fsdp2_command_parser"],
        "commands.tpu": ["tpu_command_launcher", "tpu_command_parser"],
        "config": ["LaunchConfig", "Target", "resolve_config"],
        "files": ["ConfigFile", "find_config", "read_config"],
        "notebook": ["PrepareForLaunch", "debug_launcher", "notebook_launcher"],
        "parser": ["CommandParser", "CustomArgumentGroup", "CustomArgumentParser", "add_settings"],
        "peer_config": [
            "BaseConfig",
            "ClusterConfig",
            "SageMakerConfig",
            "SageMakerDistributedType",
            "default_config_file",
            "load_config_from_file",
        ],
        "peer_launching": [
            "TORCH_LAUNCH_PARAMS",
            "install_xla",
            "prepare_deepspeed_cmd_env",
            "prepare_multi_gpu_env",
            "prepare_sagemager_args_inputs",
            "prepare_simple_launcher_cmd_env",
            "prepare_tpu",
            "test_launch",
        ],
        "plan": ["LaunchPlan", "RankPlan", "make_plan"],
        "run": ["launch", "run_plan"],
    },
)
