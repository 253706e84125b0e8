"""How each launcher tells a process its place: torchrun, Open MPI, Intel MPI and other PMI, MVAPICH, Slurm, XLA.

One function per launcher, from the environment to the arguments of `Topology`, or to None where that launcher did not
start us. The order matters: launchers start each other (srun starts mpirun's daemons, mpirun starts torchrun), and who
came last counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from accel_state.errors import TopologyError

Environment = Mapping[str, str]
Place = dict[str, int | str]

DEFAULT_PORT = 29500  # torchrun's


def place_by_launcher(environ: Environment) -> dict[str, Any] | None:
    """The arguments of `Topology` for a process that a launcher started, or None.

    Raises:
        TopologyError: variables are incomplete, not numbers, or contradict each other; names them.
    """
    for launcher in LAUNCHERS:
        place = launcher(environ)
        if place is not None:
            return dict(place)
    return None


def _place(
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    node_rank: int,
    num_nodes: int,
    address: str,
    port: int,
) -> Place:
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


# ---------------------------------------------------------------- torchrun, and everyone who sets its variables


def _from_torchrun(environ: Environment) -> Place | None:
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
    _checked_port(port)
    return _place(rank, world_size, local_rank, local_world_size, node_rank, num_nodes, address, port)


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


# ---------------------------------------------------------------- MPI


def _from_mpi(rank_name: str, size_name: str, local_rank_name: str, local_size_name: str) -> Launcher:
    """A row for an MPI that sets these four variables."""

    def read(environ: Environment) -> Place | None:
        found = {name: _integer(environ, name) for name in (rank_name, size_name, local_rank_name, local_size_name)}
        given = {name: value for name, value in found.items() if value is not None}
        if not given:
            return None
        rank, world_size = _needed(environ, rank_name, given), _needed(environ, size_name, given)
        _check_below(rank_name, rank, size_name, world_size)
        is_alone = world_size == 1 and local_rank_name not in given
        local_rank = 0 if is_alone else _needed(environ, local_rank_name, given)
        local_size = 1 if is_alone else _needed(environ, local_size_name, given)
        _check_below(local_rank_name, local_rank, local_size_name, local_size)
        _check_at_most(local_rank_name, local_rank, rank_name, rank)
        _check_at_most(local_size_name, local_size, size_name, world_size)
        num_nodes = -(-world_size // local_size)
        node_rank = _node_of(rank, local_rank, local_size, num_nodes)
        address, port = _meeting_place(environ, num_nodes, given)
        return _place(rank, world_size, local_rank, local_size, node_rank, num_nodes, address, port)

    return read


def _node_of(rank: int, local_rank: int, local_size: int, num_nodes: int) -> int:
    """MPI does not say it: ranks fill one machine after the other, or are dealt to the machines in turn."""
    node, rest = divmod(rank - local_rank, local_size)
    return min(rank - local_rank * num_nodes if rest else node, num_nodes - 1)


def _meeting_place(environ: Environment, num_nodes: int, given: Mapping[str, int]) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT; without them Slurm's first machine, or this one when there is no other."""
    address = environ.get("MASTER_ADDR") or None
    if address is None and _hosts(environ):
        address = _hosts(environ)[0]
    if address is None and num_nodes > 1:
        raise TopologyError(
            f"{_shown(given)}, so there are {num_nodes} machines, but MASTER_ADDR is not set: export it to all ranks, "
            "as the host of rank 0"
        )
    port = _integer(environ, "MASTER_PORT")
    return address or "127.0.0.1", DEFAULT_PORT if port is None else _checked_port(port)


def _checked_port(port: int) -> int:
    if not 0 < port < 65536:
        raise TopologyError(f"MASTER_PORT={port} is not a port: allowed are 1 to 65535")
    return port


_from_open_mpi = _from_mpi(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
_from_mvapich = _from_mpi(
    "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
)
_from_hydra = _from_mpi("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_from_pmi = _from_mpi("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")


def _from_intel_mpi(environ: Environment) -> Place | None:
    """Intel MPI, MPICH: Hydra's variables; srun's own PMI sets PMI_RANK too, but not these, and is left to Slurm."""
    return _from_hydra(environ) if environ.get("MPI_LOCALRANKID") else None


def _from_other_pmi(environ: Environment) -> Place | None:
    """A process manager that only speaks PMI, as Cray's."""
    return _from_pmi(environ)


# ---------------------------------------------------------------- Slurm


def _from_slurm(environ: Environment) -> Place | None:
    """A task of srun. The script of a batch job is none, though it has a SLURM_PROCID too: that of the job."""
    rank = _integer(environ, "SLURM_PROCID")
    if rank is None or _is_batch_script(environ, rank):
        return None
    size_name = _first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    nodes_name = _first_set(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    given = {"SLURM_PROCID": rank}
    world_size = _needed(environ, size_name, given)
    _check_below("SLURM_PROCID", rank, size_name, world_size)
    local_rank = 0 if world_size == 1 else _needed(environ, "SLURM_LOCALID", given)
    num_nodes = _integer(environ, nodes_name) or max(len(_hosts(environ)), 1)
    node_rank = _integer(environ, "SLURM_NODEID") or 0
    _check_below("SLURM_NODEID", node_rank, nodes_name, num_nodes)
    local_size = _tasks_on_node(environ, node_rank, num_nodes, size_name, world_size)
    _check_at_most("SLURM_LOCALID", local_rank, "SLURM_PROCID", rank)
    if local_rank >= local_size:
        raise TopologyError(
            f"SLURM_LOCALID={local_rank} contradicts the {local_size} tasks that machine {node_rank} has by "
            f"{_first_set(environ, 'SLURM_STEP_TASKS_PER_NODE', 'SLURM_TASKS_PER_NODE')}"
        )
    if _hosts(environ) and len(_hosts(environ)) < num_nodes:
        raise TopologyError(
            f"{nodes_name}={num_nodes} contradicts the machines of the job: {', '.join(_hosts(environ))}"
        )
    address, port = _meeting_place(environ, num_nodes, given)
    if not environ.get("MASTER_PORT"):
        port = _port_of_job(environ)
    return _place(rank, world_size, local_rank, local_size, node_rank, num_nodes, address, port)


def _is_batch_script(environ: Environment, rank: int) -> bool:
    has_step = any(environ.get(name) for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"))
    return rank == 0 and bool(environ.get("SLURM_JOB_ID")) and not has_step


def _tasks_on_node(environ: Environment, node_rank: int, num_nodes: int, size_name: str, world_size: int) -> int:
    """How many tasks a machine has: `2(x3),1` says it for all of them."""
    name = _first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    text = environ.get(name, "")
    if not text:
        return _integer(environ, "SLURM_NTASKS_PER_NODE") or -(-world_size // num_nodes)
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise TopologyError(f"{name}={text!r} is not a list of tasks per machine, such as 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    if len(counts) != num_nodes or sum(counts) != world_size:
        raise TopologyError(
            f"{name}={text} contradicts {size_name}={world_size} on {num_nodes} machines: it has {sum(counts)} tasks "
            f"on {len(counts)} machines"
        )
    return counts[node_rank]


def _port_of_job(environ: Environment) -> int:
    """One that every task works out alike, and that jobs on the same machine hardly share."""
    job, step = _integer(environ, "SLURM_JOB_ID") or 0, _integer(environ, "SLURM_STEP_ID") or 0
    return 20000 + (job * 31 + step) % 12000  # below the ports that systems give out themselves


def _hosts(environ: Environment) -> list[str]:
    return expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")


def expand_hosts(text: str) -> list[str]:
    """`a,n[1-3,07]-ib` as names: a, n1-ib, n2-ib, n3-ib, n07-ib. Several brackets multiply.

    Raises:
        TopologyError: a bracket that is not closed, or holds something else than numbers.
    """
    hosts: list[str] = []
    for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text):
        names = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^\]]*)(?:\]|$)", pattern):
            choices = [literal] if literal else _expand_ranges(ranges, text)
            names = [name + choice for name in names for choice in choices]
        hosts += names
    if text.count("[") != text.count("]"):
        raise TopologyError(f"the list of machines {text!r} has a bracket that is not closed")
    return hosts


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if found is None:
            raise TopologyError(f"the list of machines {text!r} has {part!r} where a number or a range has to be")
        first, last = found[1], found[2] or found[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


# ---------------------------------------------------------------- XLA


def _from_xla(environ: Environment) -> Place | None:
    """A process of torch_xla's launcher on a TPU host, or on one of several."""
    names = ("PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT")
    found = {name: _integer(environ, name) for name in names}
    given = {name: value for name, value in found.items() if value is not None}
    if not given:
        return None
    local_rank, local_size = (_needed(environ, name, given) for name in names)
    _check_below(names[0], local_rank, names[1], local_size)
    node_name = _first_set(environ, "TPU_WORKER_ID", "CLOUD_TPU_TASK_ID")
    hosts = [host for host in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    node_rank, num_nodes = _integer(environ, node_name) or 0, max(len(hosts), 1)
    _check_below(node_name, node_rank, "the number of TPU_WORKER_HOSTNAMES", num_nodes)
    port = _integer(environ, "MASTER_PORT")
    return _place(
        node_rank * local_size + local_rank,
        num_nodes * local_size,
        local_rank,
        local_size,
        node_rank,
        num_nodes,
        environ.get("MASTER_ADDR") or (hosts[0] if hosts else "127.0.0.1"),
        DEFAULT_PORT if port is None else _checked_port(port),
    )


def _first_set(environ: Environment, *names: str) -> str:
    """The first of several variables that is set, else the first of all, for messages."""
    return next((name for name in names if environ.get(name)), names[0])


Launcher = Callable[[Environment], Place | None]

LAUNCHERS: tuple[Launcher, ...] = (
    _from_torchrun,
    _from_open_mpi,
    _from_mvapich,
    _from_intel_mpi,
    _from_slurm,
    _from_other_pmi,
    _from_xla,
)
