"""Start ranks from a notebook or another running program: a function instead of a script."""

from accel_launch.notebook.launching import debug_launcher as debug_launcher
from accel_launch.notebook.launching import notebook_launcher as notebook_launcher
from accel_launch.notebook.ranks import PrepareForLaunch as PrepareForLaunch

__all__ = ["PrepareForLaunch", "debug_launcher", "notebook_launcher"]
