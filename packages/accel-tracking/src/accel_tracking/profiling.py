"""torch's profiler, configured by one dataclass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state import KwargsHandler
from accel_state.errors import SettingError

if TYPE_CHECKING:
    from torch.profiler import profile as torch_profile

logger = logging.getLogger(__name__)

PROFILE_PATTERN_NAME = "profile_{suffix}.json"
"""The name of a Chrome trace; the suffix is the rank."""

XPU_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.4.0"
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.1.0"
"""The first releases of torch that profile these devices, all older than the oldest that works here."""


@dataclass
class ProfileKwargs(KwargsHandler):
    """What `torch.profiler.profile` is told.

    Args:
        activities: of "cpu", "cuda", "xpu", "mtia", "hpu", …: what to watch; None watches all that this torch can.
        schedule_option: of `torch.profiler.schedule`: `wait`, `warmup`, `active`, and `repeat`, `skip_first`; the
            block then calls `prof.step()` after each step. None records the whole block.
        on_trace_ready: called with the profiler when an active phase of the schedule, or the block, ends.
        record_shapes: of operators' inputs.
        profile_memory: allocations too.
        with_stack: source lines.
        with_flops: estimated, of matrix products and convolutions.
        with_modules: the modules that operators belong to (TorchScript alone).
        output_trace_dir: gets a Chrome trace per rank, `profile_<rank>.json`, at the block's end; None writes none.

    Raises:
        SettingError: an unknown activity, or options that `torch.profiler.schedule` does not take; from `build`.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch_profile:
        """The profiler, not started."""
        import torch.profiler

        schedule = None
        if self.schedule_option is not None:
            try:
                schedule = torch.profiler.schedule(**self.schedule_option)
            except (TypeError, AssertionError) as error:
                raise SettingError(
                    f"schedule_option={self.schedule_option!r} is not what torch.profiler.schedule takes ({error}): "
                    "give wait, warmup and active, and if wanted repeat and skip_first, as numbers of steps"
                ) from error
        return torch.profiler.profile(
            activities=None if self.activities is None else [_activity(name) for name in self.activities],
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@contextmanager
def profile(handler: ProfileKwargs | None = None, process_index: int = 0) -> Iterator[torch_profile]:
    """A block under torch's profiler; its Chrome trace is written where `output_trace_dir` says.

    Args:
        handler: how; None takes the defaults.
        process_index: this rank, for the trace's name.

    Raises:
        SettingError: the handler is none.
    """
    handler = handler or ProfileKwargs()
    if not isinstance(handler, ProfileKwargs):
        raise SettingError(f"profile takes a ProfileKwargs, and got {handler!r}")
    with handler.build() as profiler:
        yield profiler
    if handler.output_trace_dir is not None:
        _export(profiler, Path(handler.output_trace_dir) / PROFILE_PATTERN_NAME.format(suffix=process_index))


def _export(profiler: torch_profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        profiler.export_chrome_trace(str(path))
    except (AssertionError, RuntimeError) as error:  # nothing was recorded, or `on_trace_ready` saved it already
        logger.warning(
            "no Chrome trace was written to %s: %s Either schedule_option never became active within the block, or "
            "on_trace_ready exported the trace already, which torch does once",
            path,
            error,
        )


def _activity(name: str) -> Any:
    from torch.profiler import ProfilerActivity

    members = {key.lower(): member for key, member in ProfilerActivity.__members__.items()}
    if name not in members:
        raise SettingError(f"activities contains {name!r}; this torch can watch: {', '.join(sorted(members))}")
    return members[name]
