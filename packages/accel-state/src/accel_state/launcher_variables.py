"""Reading the variables of launchers: numbers, and what they have to do with each other; torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from accel_state.errors import TopologyError

Environment = Mapping[str, str]
Place = dict[str, int | str]

DEFAULT_PORT = 29500  # torchrun's


def place(
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    node_rank: int,
    num_nodes: int,
    address: str,
    port: int,
) -> Place:
    """The arguments of `Topology`."""
    return {
        "rank": rank,
        "world_size": world_size,
        "local_rank": local_rank,
        "local_world_size": local_world_size,
        "node_rank": node_rank,
        "num_nodes": num_nodes,
        "master_address": address,
        "master_port": port,
    }


def needed(environ: Environment, name: str, given: Mapping[str, int]) -> int:
    """A number that has to be there, since others of its launcher (`given`) are."""
    value = integer(environ, name)
    if value is None:
        raise TopologyError(
            f"{shown(given)} but {name} is not set: a launcher sets both; unset what is there to run one process, "
            "or start through `accel launch` or torchrun"
        )
    return value


def integer(environ: Environment, name: str) -> int | None:
    """A variable as a number of at least 0; None where it is not set."""
    text = environ.get(name, "")
    if text in ("", "-1"):  # -1 is how some wrappers say "not distributed"
        return None
    if not (text.isascii() and text.isdigit()):
        raise TopologyError(f"{name}={text!r} is not a number: launchers set it to an integer of at least 0")
    return int(text)


def shown(given: Mapping[str, int]) -> str:
    """`RANK=1 and WORLD_SIZE=2`."""
    return " and ".join(f"{name}={value}" for name, value in given.items())


def check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    """Raise where a value is not below another one."""
    if value >= limit:
        raise TopologyError(f"{name}={value} contradicts {limit_name}={limit}: the first has to be below the second")


def check_at_most(name: str, value: int, limit_name: str, limit: int) -> None:
    """Raise where a value is above another one."""
    if value > limit:
        raise TopologyError(f"{name}={value} contradicts {limit_name}={limit}: the first can be at most the second")


def checked_port(port: int) -> int:
    """A number that a TCP port can have."""
    if not 0 < port < 65536:
        raise TopologyError(f"MASTER_PORT={port} is not a port: allowed are 1 to 65535")
    return port


def first_set(environ: Environment, *names: str) -> str:
    """The first of several variables that is set, else the first of all, for messages."""
    return next((name for name in names if environ.get(name)), names[0])
