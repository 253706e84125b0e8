"""What a process that a notebook started does first."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def call_recorded(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a rank; its error goes to torch elastic, and so into the `ChildFailedError` of the caller."""
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(function)(*args)


class PrepareForLaunch:
    """A function for each rank, with the rank's variables set first; can be pickled where the function can.

    Args:
        launcher: the function.
        distributed_type: the kind of the run, as the peer names it; only told apart from "NO" by callers.
        debug: whether ranks find their number in the first argument alone, as the debug launcher's do.
    """

    def __init__(self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type = distributed_type
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Become rank `index` and call the function with the other arguments."""
        num_processes = os.environ.get("WORLD_SIZE", "1")
        os.environ["LOCAL_RANK"] = str(index)
        node_rank, here = int(os.environ.get("NODE_RANK", "0")), int(os.environ.get("NPROC", num_processes))
        os.environ["RANK"] = str(here * node_rank + index)
        os.environ["FORK_LAUNCHED"] = "1"
        self.launcher(*args)
