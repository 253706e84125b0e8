"""`PartialState`: who am I, who are my peers, what is my device."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch

from accel_state import process_group
from accel_state.collectives import operations
from accel_state.devices import detect_kind, device_kind
from accel_state.enums import DistributedType
from accel_state.errors import StateResetError
from accel_state.hardware import set_numa_affinity
from accel_state.ordering import goes_first
from accel_state.process_facts import ProcessFacts
from accel_state.settings import setting
from accel_state.splitting import split_part
from accel_state.topology import Topology


class PartialState(ProcessFacts):
    """This process among its peers; every instance is a handle to the same state.

    Args:
        cpu: ignore every accelerator. Without a launcher's variables this is one process, under a launcher gloo ranks.
        kwargs: of `torch.distributed.init_process_group` (see `InitProcessGroupKwargs`).

    Attributes are plain values: device, num_processes, process_index, local_process_index, topology, distributed_type,
    backend, debug, fork_launched.

    Raises:
        ProcessGroupError: the ranks cannot meet.
        StateResetError: on reading an attribute after `_reset_state()`.

    Cost: the first one makes the process group (all ranks have to come) if a launcher started this process.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    device: torch.device
    num_processes: int
    process_index: int
    local_process_index: int
    topology: Topology
    distributed_type: DistributedType
    backend: str | None
    debug: bool
    fork_launched: bool

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = PartialState._shared_state
        job = process_group.start_job(cpu, **kwargs)
        if self.__dict__:
            return
        self._cpu = cpu
        self.topology = job.topology
        self.device = job.device
        self.backend = job.backend
        self.distributed_type = job.distributed_type
        self.num_processes = job.topology.world_size
        self.process_index = job.topology.rank
        self.local_process_index = job.topology.local_rank
        self.debug = setting("debug")
        self.fork_launched = multiprocessing.parent_process() is not None
        if setting("cpu_affinity"):
            set_numa_affinity(self.local_process_index)

    def __getattr__(self, name: str) -> Any:  # only for what is not there
        if not vars(self) and not name.startswith("__"):
            raise StateResetError(
                f"`PartialState` object has no attribute `{name}`: the state was reset (`PartialState._reset_state()` "
                "or `destroy_process_group()`) since this handle was made. Make a new `PartialState` or `Accelerator`"
            )
        raise AttributeError(f"'PartialState' object has no attribute {name!r}")

    def __reduce__(self) -> tuple[type[PartialState], tuple[()]]:
        return PartialState, ()

    # ---- who am I

    @property
    def initialized(self) -> bool:
        """Whether there is a state now."""
        return bool(PartialState._shared_state)

    @property
    def default_device(self) -> torch.device:
        """The best device here, whatever this process was told to use."""
        return torch.device(detect_kind().name)

    def set_device(self) -> None:
        """Make this process's device the current one of its kind."""
        if self.device.type != "cpu":
            device_kind(self.device).set_device(self.device)

    # ---- order

    def wait_for_everyone(self) -> None:
        """Return when every rank is here; at once in a single process."""
        operations.wait_for_everyone()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs the block, then all others.

        The others wait without a time-out, so that an hour of preprocessing is no error. If rank 0 leaves the block by
        an exception, the others raise too.

        Raises:
            ProcessGroupError: rank 0 failed in the block, or is gone.

        Cost: one key in the store.
        """
        with goes_first(self.is_main_process, 0, "main_process_first"):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """As `main_process_first`, on each machine for itself."""
        with goes_first(self.is_local_main_process, None, "local_main_process_first"):
            yield

    # ---- who does what

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorator: run on rank 0 only; elsewhere the call returns None."""
        return self._only_where(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorator: run on rank 0 of each machine only."""
        return self._only_where(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorator: run on the highest rank only."""
        return self._only_where(function, lambda: self.is_last_process)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: run on one rank only."""
        return self._only_where(function, lambda: self.process_index == process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: run on one rank of each machine only."""
        return self._only_where(function, lambda: self.local_process_index == local_process_index)

    def _only_where(self, function: Callable[..., Any] | None, is_here: Callable[[], bool]) -> Callable[..., Any]:
        if function is None:
            return functools.partial(self._only_where, is_here=is_here)
        if not callable(function):
            raise TypeError(f"a function is decorated so that it runs on some ranks only, and {function!r} is none")

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if is_here() else None

        return run

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """This rank's contiguous part of a list, tuple, range, tensor, numpy array, data set or dict of them.

        Types are kept; see `accel_state.splitting.split_part` for the exceptions.

        Args:
            inputs: the whole, the same on all ranks.
            apply_padding: repeat the last element so that all ranks get equally many.

        Raises:
            ValueError: the values of a dict differ in length.
            TypeError: what cannot be split, as a text, a number, a set or a stream.
        """
        return nullcontext(split_part(inputs, self.process_index, self.num_processes, apply_padding))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    # ---- the end

    def destroy_process_group(self, group: Any = None) -> None:
        """End torch's process group, or only a sub-group; every rank has to call it.

        In a forked process (a data loader's worker) only the copy of the state is dropped: the group is not its own.
        """
        if process_group.is_forked_copy():
            PartialState._reset_state()
            return
        if self.use_distributed or group is not None or process_group.has_group():
            process_group.end_job(group)
        if group is None:
            PartialState._shared_state.clear()

    @staticmethod
    def _reset_state() -> None:
        """Forget the state, for tests and notebooks; a process group that exists is kept and found again."""
        PartialState._shared_state.clear()
        process_group.forget_job()

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )
