"""A progress bar that one process shows."""

from __future__ import annotations

from typing import Any

__all__ = ["tqdm"]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`, shown by each machine's first process only.

    Args:
        args: of `tqdm.auto.tqdm`.
        main_process_only: False shows a bar on every process.
        kwargs: of `tqdm.auto.tqdm`; `disable=True` hides the bar everywhere.
    """
    from tqdm.auto import tqdm as auto

    if main_process_only:
        from accel_state import PartialState

        if not PartialState().is_local_main_process:
            kwargs["disable"] = True
    return auto(*args, **kwargs)
