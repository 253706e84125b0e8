"""What a tracker is: the base class for our own and for users', and the guard that keeps it on one process."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, ClassVar, ParamSpec, TypeVar

from accel_state.topology import Topology

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)


def is_main_process() -> bool:
    """Whether this is rank 0 of the job.

    Asks the process group where there is one, else the launcher's variables: a tracker alone never makes a process
    group, and works in a process that has not loaded torch.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return Topology.from_env().rank == 0


def on_main_process(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorates a tracker's method so that it runs on the main process only and returns None elsewhere.

    A tracker with `main_process_only = False` runs it on every process.
    """

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        if getattr(args[0], "main_process_only", False) and not is_main_process():
            return None
        return function(*args, **kwargs)

    return guarded


class GeneralTracker:
    """Base of all trackers: subclass it to report to anything.

    A subclass defines
    - `name`: what `log_with`, `init_kwargs` and `get_tracker` call it;
    - `requires_logging_directory`: whether its constructor takes `logging_dir`;
    - `tracker`: the library's own object, usually a property;
    - `store_init_configuration` and `log`, and where needed `start` and `finish`;
    - `log_images` and `log_table` where it shows those.

    Its constructor takes the project's name first (and `logging_dir` where it requires one) and only keeps what it
    was given: files and connections are opened in `start`, which runs on the processes that report.

    Attributes:
        main_process_only: False makes every process report; the default fits services that want one writer.
        in_background: whether its methods run in a thread of the tracker's own, so that one that hangs or waits for a
            network leaves the training alone. False calls them on the training thread: for trackers that are quick
            and cannot hang, and for libraries that are bound to the thread that uses them.
        patience_s: how long `log` waits at most for that thread to have taken the values, in seconds. By default code
            that reads the tracker after `log`, or reports to its library directly, finds the order that it wrote; 0
            never waits.
        timeout_s: how long one call may take, in seconds, before the run goes on without it.
        requires_package: the module without which the tracker cannot start; None for one that needs nothing.
        run_id: identifies the run where the tracker's service continues runs by id; it travels in checkpoints.

    Args:
        _blank: skips the check that the subclass is complete; for stand-ins.

    Raises:
        NotImplementedError: the subclass lacks one of the first three.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True
    in_background: bool = True
    patience_s: float = 1.0
    timeout_s: float = 30.0
    requires_package: ClassVar[str | None] = None
    run_id: str | None = None

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        wanted = ("name", "requires_logging_directory", "tracker")
        # looked up on the class: `tracker` may be a property that needs `start` first
        missing = [name for name in wanted if not hasattr(type(self), name) and name not in vars(self)]
        if missing:
            raise NotImplementedError(
                f"the tracker class {type(self).__name__} lacks {', '.join(f'`{name}`' for name in missing)}: "
                "define them in the class (`tracker` as a property that returns the library's own object)"
            )

    def start(self) -> None:
        """Opens files or connections. Called once, before anything is logged; by default there is nothing to open."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Records the run's configuration; by default it is not recorded."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Records values at a step; by default they are not recorded."""

    def finish(self) -> None:
        """Writes what is left and closes. Called once at the end; by default there is nothing to close."""

    def resume(self, run_id: str) -> None:
        """Continue the run with this id, which a checkpoint named.

        Before `start` the id is kept for it. After `start` most services cannot change runs, so the default says
        that the run goes on as a new one.
        """
        if self.run_id is None:
            self.run_id = run_id
        elif self.run_id != run_id:
            logger.warning(
                "tracker %r already reports to run %r, so run %r of the checkpoint is not continued: "
                "load the checkpoint before the trackers are initialised",
                self.name,
                self.run_id,
                run_id,
            )
