"""What Slurm tells a task of its place; torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping

from accel_state.errors import TopologyError
from accel_state.launcher_variables import (
    DEFAULT_PORT,
    Environment,
    Place,
    check_at_most,
    check_below,
    checked_port,
    first_set,
    integer,
    needed,
    place,
    shown,
)


def from_slurm(environ: Environment) -> Place | None:
    """A task of srun. The script of a batch job is none, though it has a SLURM_PROCID too: that of the job."""
    rank = integer(environ, "SLURM_PROCID")
    if rank is None or _is_batch_script(environ, rank):
        return None
    size_name = first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    nodes_name = first_set(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    given = {"SLURM_PROCID": rank}
    world_size = needed(environ, size_name, given)
    check_below("SLURM_PROCID", rank, size_name, world_size)
    local_rank = 0 if world_size == 1 else needed(environ, "SLURM_LOCALID", given)
    num_nodes = integer(environ, nodes_name) or max(len(hosts(environ)), 1)
    node_rank = integer(environ, "SLURM_NODEID") or 0
    check_below("SLURM_NODEID", node_rank, nodes_name, num_nodes)
    local_size = _tasks_on_node(environ, node_rank, num_nodes, size_name, world_size)
    check_at_most("SLURM_LOCALID", local_rank, "SLURM_PROCID", rank)
    if local_rank >= local_size:
        raise TopologyError(
            f"SLURM_LOCALID={local_rank} contradicts the {local_size} tasks that machine {node_rank} has by "
            f"{_tasks_name(environ)}"
        )
    _check_numbering(environ, rank, local_rank, node_rank)
    if hosts(environ) and len(hosts(environ)) < num_nodes:
        raise TopologyError(
            f"{nodes_name}={num_nodes} contradicts the machines of the job: {', '.join(hosts(environ))}"
        )
    address, port = meeting_place(environ, num_nodes, given)
    if not environ.get("MASTER_PORT"):
        port = _port_of_job(environ)
    return place(rank, world_size, local_rank, local_size, node_rank, num_nodes, address, port)


def local_tasks(environ: Environment, rank: int, world_size: int) -> int | None:
    """Tasks on this machine, for a process that says of itself what Slurm says of it; else None."""
    if integer(environ, "SLURM_PROCID") != rank:
        return None
    found = from_slurm(environ)
    return None if found is None or found["world_size"] != world_size else int(found["local_world_size"])


def _is_batch_script(environ: Environment, rank: int) -> bool:
    has_step = any(environ.get(name) for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"))
    return rank == 0 and bool(environ.get("SLURM_JOB_ID")) and not has_step


def _tasks_on_node(environ: Environment, node_rank: int, num_nodes: int, size_name: str, world_size: int) -> int:
    counts = _tasks_per_node(environ)
    if not counts:
        return integer(environ, "SLURM_NTASKS_PER_NODE") or -(-world_size // num_nodes)
    if len(counts) != num_nodes or sum(counts) != world_size:
        raise TopologyError(
            f"{_tasks_name(environ)}={environ[_tasks_name(environ)]} contradicts {size_name}={world_size} on "
            f"{num_nodes} machines: it has {sum(counts)} tasks on {len(counts)} machines"
        )
    return counts[node_rank]


def _tasks_name(environ: Environment) -> str:
    return first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


def _tasks_per_node(environ: Environment) -> list[int]:
    """How many tasks each machine has: `2(x3),1` says it for all of them. Empty where it is not told."""
    text = environ.get(_tasks_name(environ), "")
    counts: list[int] = []
    for part in text.split(",") if text else ():
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise TopologyError(f"{_tasks_name(environ)}={text!r} is not a list of tasks per machine, such as 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _check_numbering(environ: Environment, rank: int, local_rank: int, node_rank: int) -> None:
    """Raise where no way in which Slurm numbers tasks gives this place this number.

    Slurm deals tasks to machines in rounds of a fixed number: of one (cyclic), of some (plane), of all (block).
    """
    counts = _tasks_per_node(environ)
    if not counts or "arbitrary" in environ.get("SLURM_DISTRIBUTION", ""):
        return
    possible = {_dealt(counts, node_rank, local_rank, each) for each in range(1, max(counts) + 1)}
    if rank not in possible:
        raise TopologyError(
            f"SLURM_PROCID={rank} contradicts SLURM_NODEID={node_rank} and SLURM_LOCALID={local_rank} with "
            f"{_tasks_name(environ)}={environ[_tasks_name(environ)]}: that place has number "
            f"{' or '.join(map(str, sorted(possible)))}"
        )


def _dealt(counts: list[int], node: int, local_rank: int, each: int) -> int:
    """The number of a task when every machine gets `each` tasks per round, until it has as many as it is to have."""
    before, rest = divmod(local_rank, each)
    in_earlier_rounds = sum(min(count, before * each) for count in counts)
    in_this_round = sum(min(each, max(count - before * each, 0)) for count in counts[:node])
    return in_earlier_rounds + in_this_round + rest


def _port_of_job(environ: Environment) -> int:
    """One that every task works out alike, and that jobs on the same machine hardly share."""
    job, step = integer(environ, "SLURM_JOB_ID") or 0, integer(environ, "SLURM_STEP_ID") or 0
    return 20000 + (job * 31 + step) % 12000  # below the ports that systems give out themselves


def hosts(environ: Environment) -> list[str]:
    """The machines of the step, else of the job; none where Slurm did not start it."""
    return expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")


def expand_hosts(text: str) -> list[str]:
    """`a,n[1-3,07]-ib` as names: a, n1-ib, n2-ib, n3-ib, n07-ib. Several brackets multiply.

    Raises:
        TopologyError: a bracket that is not closed, or holds something else than numbers.
    """
    names_of_all: list[str] = []
    for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text):
        names = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^\]]*)(?:\]|$)", pattern):
            choices = [literal] if literal else _expand_ranges(ranges, text)
            names = [name + choice for name in names for choice in choices]
        names_of_all += names
    if text.count("[") != text.count("]"):
        raise TopologyError(f"the list of machines {text!r} has a bracket that is not closed")
    return names_of_all


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if found is None:
            raise TopologyError(f"the list of machines {text!r} has {part!r} where a number or a range has to be")
        first, last = found[1], found[2] or found[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def meeting_place(
    environ: Environment, num_nodes: int, given: Mapping[str, int], *, of_job: bool = False
) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT; without them Slurm's first machine, or this one when there is no other.

    Args:
        of_job: the machines are those of the job, whatever step this process is in.
    """
    address = environ.get("MASTER_ADDR") or None
    machines = (expand_hosts(environ.get("SLURM_JOB_NODELIST") or "") if of_job else []) or hosts(environ)
    if address is None and machines:
        address = machines[0]
    if address is None and num_nodes > 1:
        raise TopologyError(
            f"{shown(given)}, so there are {num_nodes} machines, but MASTER_ADDR is not set: export it to all ranks, "
            "as the host of rank 0"
        )
    port = integer(environ, "MASTER_PORT")
    return address or "127.0.0.1", DEFAULT_PORT if port is None else checked_port(port)
