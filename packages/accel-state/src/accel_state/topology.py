"""Which process am I among how many; without torch. How launchers say it is in `launchers.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from accel_state.errors import TopologyError

Environment = Mapping[str, str]


class _Fields(NamedTuple):  # a named tuple: a dataclass would import `inspect`, half of `accel --help`'s time
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_address: str | None
    master_port: int | None


class Topology(_Fields):
    """This process's place among all processes of the job; frozen and torch-free.

    Args:
        rank: this process among all, from 0.
        world_size: how many processes the job has.
        local_rank: this process among those of its machine, from 0.
        local_world_size: how many processes this machine has.
        node_rank: this machine among all, from 0.
        num_nodes: how many machines the job has.
        master_address: host that the ranks meet at; None for a process that no launcher started.
        master_port: its TCP port; None likewise.

    The defaults describe a process that was started without a launcher.

    Raises:
        TopologyError: a rank is not below its world size, or the meeting place is incomplete.
    """

    __slots__ = ()

    def __new__(
        cls,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        local_world_size: int = 1,
        node_rank: int = 0,
        num_nodes: int = 1,
        master_address: str | None = None,
        master_port: int | None = None,
    ) -> Topology:
        _check_place("rank", rank, "world_size", world_size)
        _check_place("local_rank", local_rank, "local_world_size", local_world_size)
        _check_place("node_rank", node_rank, "num_nodes", num_nodes)
        if local_world_size > world_size:
            raise TopologyError(
                f"local_world_size={local_world_size} is larger than world_size={world_size}: "
                "a machine cannot hold more processes than the whole job"
            )
        if (master_address is None) != (master_port is None):
            raise TopologyError(
                f"master_address={master_address!r} and master_port={master_port!r} belong together: give both or none"
            )
        if world_size > 1 and master_address is None:
            raise TopologyError(f"world_size={world_size} needs master_address and master_port, where the ranks meet")
        return super().__new__(
            cls, rank, world_size, local_rank, local_world_size, node_rank, num_nodes, master_address, master_port
        )

    @property
    def is_distributed(self) -> bool:
        """Whether a launcher started this process, be it the only one."""
        return self.master_address is not None

    @classmethod
    def from_env(cls, environ: Environment | None = None) -> Topology:
        """Read the launcher's variables; a process without any is rank 0 of 1.

        Args:
            environ: the variables; the process's own by default.

        Raises:
            TopologyError: the variables are incomplete, not numbers, or contradict each other; names both of them.
        """
        from accel_state.launchers import place_by_launcher

        found = place_by_launcher(os.environ if environ is None else environ)
        return cls() if found is None else cls(**found)


def _check_place(place: str, index: int, count_name: str, count: int) -> None:
    if count < 1:
        raise TopologyError(f"{count_name}={count} is not allowed: it is at least 1")
    if not 0 <= index < count:
        raise TopologyError(f"{place}={index} does not fit {count_name}={count}: allowed are 0 to {count - 1}")
