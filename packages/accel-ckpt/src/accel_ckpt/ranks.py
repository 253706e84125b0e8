"""How the ranks of a job save and load as one: every phase succeeds on all of them or fails on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from accel_state.errors import AccelError, CheckpointError

from .durable import os_reason

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among those that save or load together.

    Args:
        rank: its number.
        size: how many there are.
        local_rank, local_size: the same among the processes of its node, which share the work of verifying.
        node: its node's number.
    """

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    node: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def commits(self, on_each_node: bool) -> bool:
        """Whether this process makes a checkpoint of what is written: one of the job, or one of each node."""
        return self.local_rank == 0 if on_each_node else self.is_main


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    failure: str | None = None
    error_type: type[CheckpointError] = CheckpointError


def current_world() -> World:
    """Learn it from the process group, and only from it: no state is created where there is none.

    Raises:
        CheckpointError: a launcher started several processes, but they have no process group yet. Each would take
            itself for the only one and they would write over each other.
    """
    import torch.distributed as dist

    from accel_state.topology import Topology

    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            return World(0, 1)
        from accel_state import PartialState

        state = PartialState()
        topology = state.topology
        return World(
            topology.rank, topology.world_size, topology.local_rank, topology.local_world_size, topology.node_rank
        )
    topology = Topology.from_env()
    if topology.world_size > 1:
        raise CheckpointError(
            f"this is rank {topology.rank} of {topology.world_size} by its environment, but there is no process group. "
            "Create the Accelerator or accel_state.PartialState (or call torch.distributed.init_process_group) first."
        )
    return World(0, 1)


def together(world: World, doing: str, action: Callable[[], T]) -> list[T]:
    """Run an action on every rank; give each the results of all, by rank, or raise on all what failed on any.

    Args:
        doing: what is being done, for messages: "saving to /x".
        action: what this rank does; it must not communicate.

    Raises:
        CheckpointError: of the kind of the first failing rank, naming every rank that failed. On a rank that was
            interrupted (KeyboardInterrupt, SystemExit) the interrupt itself.

    Cost: one object gather of a few hundred bytes per rank.
    """
    error: BaseException | None = None
    try:
        outcome = _Outcome(action())
    except BaseException as caught:  # noqa: BLE001 - raised below, once the others know
        error, outcome = caught, _failed(caught)
    outcomes = _gather(world, outcome)
    if error is not None and not isinstance(error, Exception):
        raise error
    failed = [(rank, other) for rank, other in enumerate(outcomes) if other.failure is not None]
    if not failed:
        return [other.value for other in outcomes]
    if world.size == 1 and isinstance(error, AccelError):
        raise error
    parts = [f"rank {rank}: {other.failure}" if world.size > 1 else str(other.failure) for rank, other in failed]
    raise failed[0][1].error_type(f"{doing} failed: {'; '.join(parts)}") from error


def from_main(world: World, doing: str, action: Callable[[], T]) -> T:
    """Run an action on rank 0 and give its result to every rank, with errors as in `together`."""
    return together(world, doing, lambda: action() if world.is_main else None)[0]  # type: ignore[return-value]


def _failed(error: BaseException) -> _Outcome:
    kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
    return _Outcome(failure=reason_of(error), error_type=kind)


def reason_of(error: BaseException) -> str:
    """An error as another rank tells it."""
    if isinstance(error, OSError) and not isinstance(error, CheckpointError):
        return os_reason(error)
    return str(error) if isinstance(error, AccelError) else f"{type(error).__name__}: {error}"


def _gather(world: World, outcome: _Outcome) -> list[_Outcome]:
    if world.size == 1:
        return [outcome]
    from accel_state import gather_object

    outcomes: list[_Outcome] = gather_object([outcome])
    return outcomes
