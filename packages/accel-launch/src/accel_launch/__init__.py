"""Start training processes on one machine or many, from one command."""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from accel_launch.cli import main as main
    from accel_launch.commands.launch import launch_command as launch_command
    from accel_launch.commands.launch import launch_command_parser as launch_command_parser
    from accel_launch.config import LaunchConfig as LaunchConfig
    from accel_launch.config import Target as Target
    from accel_launch.config import resolve_config as resolve_config
    from accel_launch.files import ConfigFile as ConfigFile
    from accel_launch.files import find_config as find_config
    from accel_launch.files import read_config as read_config
    from accel_launch.parser import CommandParser as CommandParser
    from accel_launch.parser import add_settings as add_settings
    from accel_launch.plan import LaunchPlan as LaunchPlan
    from accel_launch.plan import RankPlan as RankPlan
    from accel_launch.plan import make_plan as make_plan
    from accel_launch.run import launch as launch
    from accel_launch.run import run_plan as run_plan

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "cli": ["main"],
        "commands.launch": ["launch_command", "launch_command_parser"],
        "config": ["LaunchConfig", "Target", "resolve_config"],
        "files": ["ConfigFile", "find_config", "read_config"],
        "parser": ["CommandParser", "add_settings"],
        "plan": ["LaunchPlan", "RankPlan", "make_plan"],
        "run": ["launch", "run_plan"],
    },
)
