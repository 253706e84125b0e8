"""Where a project keeps its files: the peer's `ProjectConfiguration`."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.errors import SettingError


@dataclass
class ProjectConfiguration:
    """Where checkpoints and logs go, and how checkpoints are named.

    Args:
        project_dir: the project's directory.
        logging_dir: where trackers write; the project's directory if not given.
        automatic_checkpoint_naming: save to `project_dir/checkpoints/checkpoint_<iteration>`.
        total_limit: with automatic naming, how many checkpoints to keep; None keeps all. Only those that accel made
            count and are removed.
        iteration: the number of the next checkpoint.
        save_on_each_node: let each node's local main process write what is saved, whole, not only the global one: for
            file systems that nodes do not share. Loading reads each node's own.

    Raises:
        SettingError: a limit that would keep nothing.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and (type(self.total_limit) is not int or self.total_limit < 1):
            raise SettingError(
                f"total_limit={self.total_limit!r} is not allowed: give how many checkpoints to keep, at least 1, or "
                "None for all"
            )
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the project's directory; the logs' directory follows only if there is none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
