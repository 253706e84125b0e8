"""Which process am I among how many: read from the launcher's variables, without torch.

Every launcher that is understood is one row of `LAUNCHERS`: a function from the environment to a `Topology`, or to
`None` when this launcher did not start us.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
        environ = os.environ if environ is None else environ
        for launcher in LAUNCHERS:
            topology = launcher(environ)
            if topology is not None:
                return topology
        return cls()


def _check_place(place: str, index: int, count_name: str, count: int) -> None:
    if count < 1:
        raise TopologyError(f"{count_name}={count} is not allowed: it is at least 1")
    if not 0 <= index < count:
        raise TopologyError(f"{place}={index} does not fit {count_name}={count}: allowed are 0 to {count - 1}")


# ---------------------------------------------------------------- torchrun, and everyone who sets its variables


def _from_torchrun(environ: Environment) -> Topology | None:
    found = {name: _integer(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    given = {name: value for name, value in found.items() if value is not None}
    if not given:  # MASTER_ADDR alone is often exported machine-wide and starts nothing
        return None
    rank = _needed(environ, "RANK", given)
    world_size = _needed(environ, "WORLD_SIZE", given)
    _check_below("RANK", rank, "WORLD_SIZE", world_size)
    local_rank = 0 if world_size == 1 and found["LOCAL_RANK"] is None else _needed(environ, "LOCAL_RANK", given)
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE")
    if local_world_size is None:
        if local_rank != rank:
            raise TopologyError(
                f"RANK={rank} and LOCAL_RANK={local_rank} differ, so there are several machines, but LOCAL_WORLD_SIZE "
                "is not set: set it to the number of processes on this machine"
            )
        local_world_size = world_size
    _check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    _check_at_most("LOCAL_RANK", local_rank, "RANK", rank)
    _check_at_most("LOCAL_WORLD_SIZE", local_world_size, "WORLD_SIZE", world_size)
    node_rank, num_nodes = _nodes(environ, rank - local_rank, local_world_size, world_size)
    address = environ.get("MASTER_ADDR") or None
    if address is None:
        raise TopologyError(f"{_shown(given)} but MASTER_ADDR is not set: set it to the host of rank 0")
    port = _needed(environ, "MASTER_PORT", given)
    if not 0 < port < 65536:
        raise TopologyError(f"MASTER_PORT={port} is not a port: allowed are 1 to 65535")
    return Topology(rank, world_size, local_rank, local_world_size, node_rank, num_nodes, address, port)


def _nodes(environ: Environment, first_rank_here: int, local_world_size: int, world_size: int) -> tuple[int, int]:
    """This machine's number and how many there are: as told, else as if all machines held as many processes."""
    node_rank = _integer(environ, "GROUP_RANK")
    if node_rank is None:
        node_rank = first_rank_here // local_world_size
    num_nodes = _integer(environ, "GROUP_WORLD_SIZE")
    if num_nodes is None:
        return node_rank, max(-(-world_size // local_world_size), node_rank + 1)
    _check_below("GROUP_RANK", node_rank, "GROUP_WORLD_SIZE", num_nodes)
    return node_rank, num_nodes


def _needed(environ: Environment, name: str, given: Mapping[str, int]) -> int:
    value = _integer(environ, name)
    if value is None:
        raise TopologyError(
            f"{_shown(given)} but {name} is not set: a launcher sets both; unset what is there to run one process, "
            "or start through `accel launch` or torchrun"
        )
    return value


def _integer(environ: Environment, name: str) -> int | None:
    text = environ.get(name, "")
    if text in ("", "-1"):  # -1 is how some wrappers say "not distributed"
        return None
    if not (text.isascii() and text.isdigit()):
        raise TopologyError(f"{name}={text!r} is not a number: launchers set it to an integer of at least 0")
    return int(text)


def _shown(given: Mapping[str, int]) -> str:
    return " and ".join(f"{name}={value}" for name, value in given.items())


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise TopologyError(f"{name}={value} contradicts {limit_name}={limit}: the first has to be below the second")


def _check_at_most(name: str, value: int, limit_name: str, limit: int) -> None:
    if value > limit:
        raise TopologyError(f"{name}={value} contradicts {limit_name}={limit}: the first can be at most the second")


LAUNCHERS: tuple[Callable[[Environment], Topology | None], ...] = (_from_torchrun,)
